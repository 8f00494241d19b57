"""One root class for what callers may see, with a stable reason, and the error of configuration files."""

import reprlib

import grpc

SHOWN = 80
"""Characters of a wrong value in a message."""
_STATUS = {
    "INVALID_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "REQUEST_ID_REUSED": grpc.StatusCode.INVALID_ARGUMENT,
    "IMMUTABLE_FIELD": grpc.StatusCode.INVALID_ARGUMENT,
    "INCONSISTENT_SETTINGS": grpc.StatusCode.INVALID_ARGUMENT,
    "DEADLINE_REQUIRED": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "ETAG_MISMATCH": grpc.StatusCode.ABORTED,
    "NOT_LEADER": grpc.StatusCode.UNAVAILABLE,
    "SESSION_FENCED": grpc.StatusCode.FAILED_PRECONDITION,
    "SESSION_EXPIRED": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_FENCE": grpc.StatusCode.FAILED_PRECONDITION,
    "STALE_ATTEMPT": grpc.StatusCode.FAILED_PRECONDITION,
    "SEQUENCE_GAP": grpc.StatusCode.FAILED_PRECONDITION,
    "ILLEGAL_TRANSITION": grpc.StatusCode.FAILED_PRECONDITION,
    "NO_PROGRESS": grpc.StatusCode.FAILED_PRECONDITION,
    "COMMIT_REFUSED": grpc.StatusCode.FAILED_PRECONDITION,
    "STEP_TAKEN": grpc.StatusCode.FAILED_PRECONDITION,
    "VERSION_UNUSABLE": grpc.StatusCode.FAILED_PRECONDITION,
    "PLAN_OUTDATED": grpc.StatusCode.FAILED_PRECONDITION,
    "LIMIT_BROKEN": grpc.StatusCode.FAILED_PRECONDITION,
    "RELEASE_UNCONFIRMED": grpc.StatusCode.FAILED_PRECONDITION,
    "CAPACITY": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "COMPACTED": grpc.StatusCode.OUT_OF_RANGE,
    "BLOB_MISMATCH": grpc.StatusCode.DATA_LOSS,
    "NOT_ALLOWED": grpc.StatusCode.PERMISSION_DENIED,
    "NOT_AUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
    "ENGINE_STATE": grpc.StatusCode.FAILED_PRECONDITION,
    "BAD_PAGE_TOKEN": grpc.StatusCode.INVALID_ARGUMENT,
    "RUN_NOT_ACTIVE": grpc.StatusCode.FAILED_PRECONDITION,
    "INTERNAL": grpc.StatusCode.INTERNAL,
}
"""gRPC status of each reason of libra.v1.ErrorReason."""


class LibraError(Exception):
    """A refusal with a stable reason code, a sentence for people, and metadata for programs.

    `reason` is the name of a libra.v1.ErrorReason value without its prefix, or one of the transport's
    (UNAVAILABLE, DEADLINE_EXCEEDED, UNIMPLEMENTED, UNKNOWN, CANCELLED) when a call failed before the server's word.
    """

    def __init__(self, reason: str, message: str, status: grpc.StatusCode | None = None, /, **metadata: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.status = status or _STATUS.get(reason, grpc.StatusCode.UNKNOWN)
        self.metadata = metadata

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class ConfigError(Exception):
    """A configuration file, flag or input file is wrong: the message says where, what was expected and what to do.

    Commands print it and exit with code 2 before anything starts.
    """


def shown(value: object) -> str:
    """A wrong value for a message: as Python writes it, but short however long or deep it is."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = SHOWN
    text = short.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def invalid_field(message: str, **metadata: str) -> LibraError:
    """A field is missing, malformed, out of bounds or not finite."""
    return LibraError("INVALID_FIELD", message, **metadata)


def inconsistent(message: str, **metadata: str) -> LibraError:
    """Settings contradict each other; the message states both numbers."""
    return LibraError("INCONSISTENT_SETTINGS", message, **metadata)


def not_found(name: str) -> LibraError:
    """No resource of that name."""
    return LibraError("NOT_FOUND", f"no resource {name!r}; list its kind to see which there are", resource=name)


def already_exists(name: str, what: str) -> LibraError:
    """The name is taken by something else."""
    return LibraError("ALREADY_EXISTS", f"{name!r} exists already: {what}", resource=name)


def stale_fence(message: str, **metadata: str) -> LibraError:
    """Term, epoch, generation or sequence is below the highest seen."""
    return LibraError("STALE_FENCE", message, **metadata)


def stale_attempt(message: str, **metadata: str) -> LibraError:
    """The attempt or lease epoch is not the current one; the result is dropped."""
    return LibraError("STALE_ATTEMPT", message, **metadata)


def illegal_transition(message: str, **metadata: str) -> LibraError:
    """The (state, event) pair is not in the transition table."""
    return LibraError("ILLEGAL_TRANSITION", message, **metadata)


def engine_state(message: str, **metadata: str) -> LibraError:
    """The engine is in a state that forbids this."""
    return LibraError("ENGINE_STATE", message, **metadata)


def blob_mismatch(uri: str, message: str) -> LibraError:
    """A blob's bytes differ from its hash, or it is gone."""
    return LibraError("BLOB_MISMATCH", f"{uri}: {message}", resource=uri)


def unimplemented(method: str) -> LibraError:
    """The contract has it, this version does not; docs/limits.md lists what is missing."""
    return LibraError(
        "UNIMPLEMENTED",
        f"{method} is part of the contract but not implemented yet; docs/limits.md lists these",
        grpc.StatusCode.UNIMPLEMENTED,
    )

"""The policy in memory: which run, which version, and how it gets to the newest one after a start or a loss.

Newest state: a live peer's (the collective heals), else the newest checkpoint c and the redo log c+1..head. Redo trains
each committed manifest again, alone, without asking for a decision that has been made.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from services.common import log, wire
from services.common.errors import LibraError
from services.common.history import History
from services.trainer import algorithm, batches, publish, step
from services.trainer.checkpoints import Checkpoint, Checkpoints
from services.trainer.collective import SoloCollective
from services.trainer.coordinator import Coordinator
from services.trainer.engine.base import Array
from services.trainer.publish import Files
from services.trainer.version import Version

_log = log.get(__name__)

MAX_KEPT_FILES = 2
"""Published versions whose bytes stay in memory for ReadWeights."""
MAX_KEPT_CHECKPOINTS = 16


class RecoveryFailed(Exception):
    """Neither a checkpoint with its redo log nor a peer leads to the head; a person has to look."""


class ResidentPolicy:
    """One run's trainable policy, loaded. `version` is what the engine holds; only the training thread changes it."""

    def __init__(
        self, run: wire.Run, worker: step.Worker, desk: Coordinator, history: History, who: str, micro_batch_tokens: int
    ) -> None:
        """Loads version 0. INVALID_FIELD if the settings or the model are wrong."""
        self.run = run
        self.id = next((p.id for p in run.policies if not p.frozen), "")
        self.grpo = algorithm.parse(run.algorithm)
        self.micro_batch_tokens = min(filter(None, (micro_batch_tokens, self.grpo.micro_batch_tokens)))
        self.folder: Path = publish.model_folder(next(p.model for p in run.policies if p.id == self.id))
        self.checkpoints = Checkpoints(worker.store, publish.run_id(run.name))
        self.kept_checkpoints: list[Checkpoint] = []
        self.kept_files: list[Files] = []
        self.redo: list[str] = []
        self.metrics: dict[str, float] = {}
        self.provisional = False
        """True after a redo: equal to the other replicas' state up to rounding, so a live peer's is taken instead."""
        self.published: Version | None = None
        self._worker, self._desk, self._history, self._who = worker, desk, history, who
        worker.engine.load(self.folder, self.grpo)
        self.version = Version(1, 0)

    def head(self) -> Version:
        """The newest committed version, from the scheduler."""
        run = self._desk.run(self.run.name)
        return Version.of(next(p.head for p in run.policies if p.id == self.id))

    def claimed(self) -> Version:
        """The version to state in a quorum: a provisional state yields to a peer that has the real one."""
        return self.version.before() if self.provisional else self.version

    def take_state(self, arrays: Mapping[str, Array], counter: int) -> None:
        """Takes over a peer's state."""
        self._worker.engine.load_state(arrays)
        self.version, self.provisional = Version.of_counter(counter), False
        _log.info("state taken from a peer", version=str(self.version))

    def restore(self, head: Version) -> None:
        """Goes to the newest checkpoint that is not above `head`, unless what is in memory is newer."""
        found = self.checkpoints.newest(head)
        if found is None or (found[0] <= self.version <= head and self.version.lineage == head.lineage):
            if self.version.lineage != head.lineage:
                raise RecoveryFailed(f"{self.run.name}: no checkpoint of lineage {head.lineage} is readable")
            return
        version, state = found
        self._worker.engine.load_state(state)
        self.version, self.provisional = version, False
        _log.info("checkpoint restored", version=str(version))

    def recover(self, head: Version, note: Callable[[Version, dict[str, float]], None]) -> None:
        """Redoes committed steps until the engine holds `head`. `note` gets each redone version and its metrics."""
        with self._worker.phases.phase(wire.TRAINER_PHASE_RECOVER):
            self.restore(head)
            if self.version >= head:
                return
            log_ = self._desk.redo_log(self.run.name, head.lineage, self.version.number)
            self.redo = [m.name for m in log_ if m.base_version.number < head.number]
            _log.info("redo", start=str(self.version), head=str(head), manifests=len(self.redo))
            for manifest in log_:
                if self.version >= head:
                    break
                if manifest.base_version.number != self.version.number:
                    break
                note(self.version.next(), self._redo_one(manifest))
                self.redo.pop(0)
            if self.version < head:
                raise RecoveryFailed(
                    f"{self.run.name}: the redo log does not lead from {self.version} to {head}; its manifests may "
                    "be covered by a checkpoint that is not readable here"
                )
            self._adopt_published()

    def _redo_one(self, manifest: wire.Manifest) -> dict[str, float]:
        laid_out = batches.batch(manifest, self._desk.members(manifest.name), self.grpo)
        solo = SoloCollective()
        try:
            reduced = step.reduce(
                self._worker, laid_out, laid_out.shard(0, 1), self.grpo, solo, self.micro_batch_tokens
            )
        except step.Unreadable as error:
            raise RecoveryFailed(f"{manifest.name} cannot be redone: {error}") from error
        self.expect_tokens(manifest, reduced.trainable_tokens)
        made = self.version.next()
        norm = self._worker.engine.apply(reduced.gradient, self.grpo.rate_of(made.number))
        self._worker.pay()
        self.version, self.provisional = made, True
        self._history.write(
            "trained", manifest=manifest.name, version=[self.version.lineage, self.version.number], worker=self._who,
            members=len(laid_out.members), replicas=1, redo=True, trainable_tokens=reduced.trainable_tokens,
        )  # fmt: skip
        return step.metrics(reduced, self.grpo, made.number, norm, batches.statistics(laid_out))

    @staticmethod
    def expect_tokens(manifest: wire.Manifest, found: int) -> None:
        """INTERNAL if the shards do not add up to the manifest's divisor."""
        expected = manifest.divisors.trainable_tokens
        if found != expected:
            raise LibraError(
                "INTERNAL", f"{manifest.name}: {found} tokens are in the loss, the manifest's divisor is {expected}",
                resource=manifest.name, expected=str(expected), actual=str(found),
            )  # fmt: skip

    # ---- publishing

    def record(self, version: Version) -> wire.WeightVersion | None:
        """The scheduler's record of a version."""
        for found in self._desk.versions(self.run.name):
            if Version.of(found.version) == version and found.version.policy in ("", self.id):
                return found
        return None

    def _adopt_published(self) -> None:
        """A version that is published is its published bytes: a redo differs from them by rounding at most."""
        record = self.record(self.version)
        if record is not None and record.state == wire.VERSION_STATE_PUBLISHED and record.files.shards:
            self._worker.engine.load_weights(publish.read(self._worker.store, record.files))
            self.published = self.version

    def publish(self, *, checkpoint: bool) -> None:
        """Writes the weights (and a checkpoint) and tells the scheduler. Harmless when somebody else did it too."""
        with self._worker.phases.phase(wire.TRAINER_PHASE_PUBLISH):
            files = self.files()
            saved = self.save_checkpoint() if checkpoint else None
            try:
                self._tell(files, saved)
            except LibraError as error:
                if error.reason != "IMMUTABLE_FIELD":
                    raise
                _log.warning("published by another replica with other bytes; taking those", version=str(self.version))
                self.kept_files.remove(files)
                self._adopt_published()
                saved = self.save_checkpoint() if checkpoint else None
                self._tell(self.files(), saved)
            self.published = self.version

    def _tell(self, files: Files, saved: Checkpoint | None) -> None:
        index = saved.index if saved else None
        self._desk.publish(self.run.name, self.version.ref(self.id), files.manifest, index)
        if self.published != self.version:
            version = [self.version.lineage, self.version.number]
            self._history.write("published", version=version, checksum=files.manifest.checksum)

    def files(self) -> Files:
        """The present version's weights, written once."""
        known = next((f for f in self.kept_files if f.version == self.version), None)
        if known is None:
            known = publish.write(self._worker.store, self.run.name, self.version, self._worker.engine.weights())
            self.kept_files = [*self.kept_files, known][-MAX_KEPT_FILES:]
        return known

    def save_checkpoint(self) -> Checkpoint:
        """Saves the present version, unless that was done."""
        for known in self.kept_checkpoints:
            if known.version == self.version:
                return known
        saved = self.checkpoints.save(self.version, self._worker.engine.state(), asdict(self.grpo))
        self.kept_checkpoints = [*self.kept_checkpoints, saved][-MAX_KEPT_CHECKPOINTS:]
        self._history.write("checkpoint", version=[self.version.lineage, self.version.number])
        return saved

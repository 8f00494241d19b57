"""P5: no trained token is staler than K. Read from the blobs' own version column, not from what was registered.

Age of a token: number of the step's base version minus number of the version that sampled it, over tokens with loss
mask 1 that the manifest does not mask. The registered version spans, from which the scheduler enforces the bound, must
say the same as the column.
"""

import numpy as np

from services.common import wire
from services.ops.archive import SURVIVING_MANIFESTS, Archive, manifest_state
from services.ops.checks.finding import Finding
from services.ops.checks.segments import Columns, Segments


def check(archive: Archive, segments: Segments) -> Finding:
    """Counts `max_staleness` in versions, over all surviving steps."""
    finding = Finding({"max_staleness": 0, "trained_tokens_checked": 0})
    for row in archive.members:
        manifest = archive.manifests.get(row.manifest)
        if manifest is None or manifest_state(manifest) not in SURVIVING_MANIFESTS:
            continue
        for sequence in row.member.sequences:
            for item in sequence.segments:
                columns = segments.columns(item)
                if isinstance(columns, str):
                    finding.add(
                        "P5.unreadable", row.member.trajectory, f"trained, but its tokens cannot be read: {columns}"
                    )
                    continue
                where = f"{row.member.trajectory} sequence {sequence.index} at {item.first_position}"
                _spans_agree(where, item, columns, finding)
                trained = columns.mask & ~_masked(row.member, sequence.index, item)
                _age(where, manifest, columns, trained, finding)
    return finding


def _masked(member: wire.ManifestMember, sequence: int, item: wire.Segment) -> np.ndarray:
    masked = np.zeros(item.tokens, bool)
    for span in member.masked:
        if span.sequence == sequence:
            first = span.first_position - item.first_position
            masked[max(0, first) : max(0, first + span.tokens)] = True
    return masked


def _age(where: str, manifest: wire.Manifest, columns: Columns, trained: np.ndarray, finding: Finding) -> None:
    finding.count("trained_tokens_checked", int(trained.sum()))
    versions = columns.version[trained]
    base = manifest.base_version
    if not len(versions):
        return
    foreign = versions[:, 0] != base.lineage
    if foreign.any():
        finding.add(
            "P5.other_lineage", where, f"{int(foreign.sum())} trained tokens were not sampled in lineage {base.lineage}"
        )
    ages = base.number - versions[~foreign, 1]
    if not len(ages):
        return
    oldest, newest = int(ages.max()), int(ages.min())
    finding.numbers["max_staleness"] = max(finding.numbers["max_staleness"], oldest)
    if oldest > manifest.max_versions:
        finding.add(
            "P5.too_stale", where,
            f"a trained token is {oldest} versions old at step {manifest.step}; the bound is {manifest.max_versions}",
        )  # fmt: skip
    if newest < 0:
        finding.add(
            "P5.from_the_future", where,
            f"a trained token was sampled {-newest} versions after the base version of step {manifest.step}",
        )  # fmt: skip


def _spans_agree(where: str, item: wire.Segment, columns: Columns, finding: Finding) -> None:
    """The registered spans against the column: same version for each generated token, same trainable sums."""
    registered = np.full((item.tokens, 2), -1, np.int64)
    for span in item.versions:
        first = span.first_position - item.first_position
        inside = slice(max(0, first), max(0, first + span.tokens))
        registered[inside] = (span.version.lineage, span.version.number)
        trainable = int(columns.mask[inside].sum())
        if trainable != span.trainable_tokens:
            finding.add(
                "P5.spans_differ", where,
                f"a span of version {span.version.lineage}-{span.version.number} registers {span.trainable_tokens} "
                f"trainable tokens, the blob has {trainable}",
            )  # fmt: skip
    different = int((registered != columns.version)[columns.generated].any(axis=1).sum())
    if different:
        finding.add("P5.spans_differ", where, f"{different} tokens have another version in the blob than registered")
    if int(columns.mask.sum()) != item.trainable_tokens:
        finding.add(
            "P5.spans_differ", where,
            f"{item.trainable_tokens} trainable tokens are registered, the blob has {int(columns.mask.sum())}",
        )  # fmt: skip

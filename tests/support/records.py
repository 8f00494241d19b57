"""A tiny finished run as a folder, consistent to the last token: real blobs, real weights, real log-probabilities.

Two steps of two groups of two. One trajectory was preempted by the queue and went on at another worker under newer
weights, one lost its worker in the middle, one accelerator went to training and came back, one engine was handed over.
Tests falsify one thing in it and expect the checker to name it.
"""

import hashlib
import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from services.common import segment, wire
from services.common.blobs import BlobStore
from services.ops import records

RUN = "runs/tiny"
NODE = "nodes/n0"
PREEMPTED = f"{RUN}/trajectories/2-0"
CRASHED = f"{RUN}/trajectories/3-1"
EPOCH = 1_800_000_000.0
VOCABULARY = 32


def make_model(folder: Path, seed: int = 0):
    """A random Qwen3 of a few thousand parameters, saved in HF form; returns the model."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


def true_logprobs(model, ids: np.ndarray) -> np.ndarray:
    """log p(ids[t] | before), 0 at t = 0."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0].log_softmax(-1)
    chosen = logits[:-1].gather(-1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    return np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)


@dataclass
class Cut:
    """A registered segment: tokens of one lease."""

    who: str
    lease: int
    tokens: int
    version: int
    prompt: int = 0


@dataclass
class TinyRun:
    """Builds the folder; what was built stays in the fields."""

    folder: Path
    with_model: bool = True
    blobs: BlobStore = field(init=False)
    events: list[wire.Event] = field(default_factory=list)
    facts: list[dict] = field(default_factory=list)
    trajectories: list[wire.Trajectory] = field(default_factory=list)
    models: list = field(default_factory=list)
    _revision: int = 0
    _now: float = EPOCH

    def __post_init__(self) -> None:
        self.blobs = BlobStore(str(self.folder / "blobs"))

    # ---- small pieces

    def event(self, kind, name, before, after, code="", text="", *, numbers=None, related=(), same=False) -> None:
        """One event; `same` puts it into the transaction of the one before."""
        index = self.events[-1].index + 1 if same else 0
        self._revision += not same
        self._now += 0.0 if same else 0.05
        self.events.append(
            wire.Event(
                revision=self._revision,
                index=index,
                time=wire.timestamp(self._now),
                term=1,
                kind=wire.ResourceKind.Value(f"RESOURCE_KIND_{kind}"),
                name=name,
                from_state=before,
                to_state=after,
                reason=wire.Reason(code=code, text=text, numbers=numbers),
                related=related,
            )
        )

    def fact(self, who, kind, **fields) -> None:
        """One history line."""
        self.facts.append({"t": round(self._now, 6), "who": who, "kind": kind, **fields})

    def chain(self, kind, name, *states, codes=None, related=()) -> None:
        """Events through these states, from nothing."""
        for before, after in zip(("", *states), states, strict=False):
            self.event(kind, name, before, after, (codes or {}).get(after, ""), related=related if not before else ())

    # ---- the run

    def build(self) -> "TinyRun":
        """Writes everything."""
        model_dir = self.folder / "model"
        if self.with_model:
            self.models = [make_model(model_dir)]
            for number in (1, 2):
                self.models.append(make_model(self.folder / "scratch", seed=number))
        self.event("RUN", RUN, "", "ACTIVE", "CREATED")
        self.event("WEIGHT_VERSION", self.version(0), "", "PUBLISHED", "BASE_MODEL")
        self.fleet()
        manifests, members = [], []
        cuts = {
            "2-0": [Cut("rollout-2", 1, 12, 0, prompt=5), Cut("rollout-1", 2, 9, 1)],
            "3-1": [Cut("rollout-3", 1, 10, 0, prompt=4), Cut("rollout-2", 2, 8, 1)],
        }
        for group in range(4):
            step = group // 2 + 1
            name = f"{RUN}/groups/{group}"
            self.event("GROUP", name, "", "OPEN", "ADMITTED")
            for sample in range(2):
                key = f"{group}-{sample}"
                default = [Cut("rollout-1", 1, 10 + group, step - 1, prompt=4 + sample)]
                self.trajectory(key, name, sample, cuts.get(key, default), reward=float(sample))
            self.event("GROUP", name, "OPEN", "CLOSED", "ALL_MEMBERS_SCORED")
            for sample in range(2):
                self.event("TRAJECTORY", f"{RUN}/trajectories/{group}-{sample}", "SCORED", "READY", same=True)
            if group % 2:
                manifest, rows = self.step(step, (group - 1, group))
                manifests.append(manifest)
                members += rows
                if step == 1:
                    self.reassign()
        self.event("RUN", RUN, "ACTIVE", "FINISHED", "TASKS_DONE")
        self.write(manifests, members, model_dir)
        return self

    def version(self, number: int) -> str:
        """Name of a version."""
        return f"{RUN}/policies/default/lineages/1/versions/{number}"

    def fleet(self) -> None:
        """First replicas: acc 0 trains, the others generate."""
        for index, role in enumerate(("trainer", "rollout", "rollout", "rollout")):
            generation = index + 1
            name = f"replicas/{role}-{generation}"
            accelerator = f"{NODE}/accelerators/{index}"
            self.chain("REPLICA", name, "PLANNED", "STARTING", "ACTIVE", related=(accelerator,))

    def trajectory(self, key, group, sample, cuts: list[Cut], reward) -> None:
        """One episode from admission to its reward, with its blobs and history."""
        name = f"{RUN}/trajectories/{key}"
        rng = np.random.default_rng(int.from_bytes(key.encode(), "big"))
        total = sum(c.tokens + c.prompt for c in cuts)
        ids = rng.integers(0, VOCABULARY, total).astype(np.int32)
        scored = {c.version: true_logprobs(self.models[c.version], ids) for c in cuts} if self.with_model else {}
        self.event("TRAJECTORY", name, "", "QUEUED", "ADMITTED")
        segments, turns, position, generated = [], [], 0, 0
        for part, cut in enumerate(cuts):
            self.event("TRAJECTORY", name, "QUEUED", "LEASED", "LEASED", related=(f"workers/{cut.who}",))
            self.fact(cut.who, "leased", trajectory=name, attempt=1, lease_epoch=cut.lease, kept_tokens=generated)
            n = cut.prompt + cut.tokens
            own = slice(position, position + n)
            mask = np.array([0] * cut.prompt + [1] * cut.tokens, np.uint8)
            version = np.where(mask[:, None] == 1, np.array([[1, cut.version]]), -1).astype(np.int64)
            logprob = np.where(mask == 1, scored[cut.version][own] if scored else 0.0, 0.0).astype(np.float32)
            data = segment.encode({"ids": ids[own], "loss_mask": mask, "logprob": logprob, "weight_version": version})
            blob = self.blobs.put(f"tiny/{key}/1/0-{hashlib.sha256(data).hexdigest()}.safetensors", data)
            first_generated = position + cut.prompt
            segments.append(
                wire.Segment(
                    blob=blob, first_position=position, tokens=n, trainable_tokens=cut.tokens,
                    versions=[
                        wire.VersionSpan(
                            version=wire.VersionRef(lineage=1, number=cut.version), first_position=first_generated,
                            tokens=cut.tokens, trainable_tokens=cut.tokens,
                        )
                    ],
                    logprob_kind=wire.LOGPROB_KIND_SAMPLED, sampling=wire.SamplingParams(temperature=1.0, top_p=1.0),
                    kv_policy=wire.KV_POLICY_RECOMPUTE,
                )
            )  # fmt: skip
            last = part == len(cuts) - 1
            turns.append(
                wire.Turn(
                    index=0, part=part, first_position=first_generated, generated_tokens=cut.tokens,
                    prompt_tokens=cut.prompt, finish=wire.FINISH_REASON_STOP if last else 0,
                    interruption=0 if last else wire.INTERRUPTION_PREEMPTED,
                )
            )  # fmt: skip
            generated += cut.tokens
            # the crashed worker had generated 6 more than it could report
            lost = 6 if name == CRASHED and not last else 0
            self.fact(
                cut.who, "generated", trajectory=name, attempt=1, lease_epoch=cut.lease, generated=generated + lost
            )
            self.fact(
                cut.who, "acked", trajectory=name, attempt=1, lease_epoch=cut.lease, sequence=0,
                first_position=position, tokens=n, trainable_tokens=cut.tokens, sha256=blob.sha256, uri=blob.uri,
                session_epoch=1,
            )  # fmt: skip
            position += n
            if last:
                self.fact(cut.who, "ended", trajectory=name, attempt=1, lease_epoch=cut.lease, how="reward")
                self.event("TRAJECTORY", name, "LEASED", "SCORED", "SCORED")
            elif name == CRASHED:
                self.event(
                    "TRAJECTORY", name, "LEASED", "QUEUED", "SESSION_EXPIRED", numbers={"kept_tokens": generated}
                )
            else:
                self.command("cmlfq", name)
                self.fact(cut.who, "ended", trajectory=name, attempt=1, lease_epoch=cut.lease, how="PREEMPTED")
                self.event("TRAJECTORY", name, "LEASED", "QUEUED", "PREEMPTED", numbers={"kept_tokens": generated})
        self.trajectories.append(
            wire.Trajectory(
                name=name, group=group, sample=sample, state=wire.TRAJECTORY_STATE_TRAINED, attempt=1,
                lease_epoch=cuts[-1].lease, reward=wire.Reward(value=reward),
                attempts=[wire.Attempt(number=1, leases=len(cuts))],
                tokens=wire.TokenCounts(prompt=cuts[0].prompt, generated=generated, trainable=generated),
                sequences=[wire.Sequence(index=0, segments=segments)], turns=turns,
            )
        )  # fmt: skip

    def command(self, cause: str, subject: str) -> None:
        """A preemption asked for and done."""
        name = f"commands/{self._revision}"
        self.event("COMMAND", name, "", "PENDING", "QUANTUM", "its quantum is used up", related=(subject, cause))
        self.event("COMMAND", name, "PENDING", "DELIVERED")
        self.event("COMMAND", name, "DELIVERED", "SUCCEEDED")

    def step(self, step: int, groups) -> tuple[wire.Manifest, list[dict]]:
        """Takes, trains, commits and publishes a step."""
        name = f"{RUN}/manifests/{step}"
        chosen = [t for t in self.trajectories if int(t.group.rpartition("/")[2]) in groups]
        digest, trainable, rows = hashlib.sha256(), 0, []
        for t in chosen:
            bits = struct.pack(">d", t.reward.value).hex()
            for item in t.sequences[0].segments:
                digest.update(f"{t.name} 1 {bits} 0 {item.first_position} {item.blob.sha256}\n".encode())
                trainable += item.trainable_tokens
            member = wire.ManifestMember(
                trajectory=t.name, attempt=1, sample=t.sample, group=t.group, reward=t.reward, tokens=t.tokens,
                sequences=t.sequences, finish=wire.FINISH_REASON_STOP,
            )  # fmt: skip
            rows.append({"manifest": name, "member": records.line(member)})
            t.consumptions.add(version=wire.VersionRef(lineage=1, number=step), manifest=name)
            self.event("TRAJECTORY", t.name, "READY", "BATCHED", same=t is not chosen[0])
        self.event("MANIFEST", name, "", "TAKEN", same=True)
        for group in groups:
            self.event("GROUP", f"{RUN}/groups/{group}", "CLOSED", "BATCHED", same=True)
        self.fact("trainer-0", "taken", manifest=name, step=step)
        for i, t in enumerate(chosen):
            self.event("TRAJECTORY", t.name, "BATCHED", "TRAINED", same=i > 0)
        for group in groups:
            self.event("GROUP", f"{RUN}/groups/{group}", "BATCHED", "DONE", same=True)
        self.event("MANIFEST", name, "TAKEN", "COMMITTED", same=True)
        self.event("WEIGHT_VERSION", self.version(step), "", "COMMITTED", same=True)
        self.fact("trainer-0", "committed", manifest=name, version=[1, step])
        self.fact(
            "trainer-0", "trained", manifest=name, version=[1, step], worker="trainer-0", members=1, redo=False,
            trainable_tokens=trainable,
        )  # fmt: skip
        self.event("WEIGHT_VERSION", self.version(step), "COMMITTED", "PUBLISHED")
        self.fact("trainer-0", "published", version=[1, step], checksum="0" * 64)
        for who in ("rollout-1", "rollout-2"):
            self.fact(who, "loaded", run=RUN, version=[1, step], checksum="0" * 64)
        manifest = wire.Manifest(
            name=name, step=step, base_version=wire.VersionRef(lineage=1, number=step - 1),
            state=wire.MANIFEST_STATE_COMMITTED, groups=2, members_sha256=digest.hexdigest(), max_versions=2,
            divisors=wire.Divisors(trainable_tokens=trainable, trajectories=len(chosen)),
            create_time=wire.timestamp(self._now - 1.0), end_time=wire.timestamp(self._now),
        )  # fmt: skip
        return manifest, rows

    def reassign(self) -> None:
        """Accelerator 2 goes to training and comes back."""
        accelerator = f"{NODE}/accelerators/2"
        for uid, old, new in (("a", "rollout-3", "trainer-5"), ("b", "trainer-5", "rollout-6")):
            name = f"reassignments/{uid}"
            self.event("REASSIGNMENT", name, "", "PENDING", "TRAINING_BOUND", "training waits", related=(accelerator,))
            self.event("REPLICA", f"replicas/{old}", "ACTIVE", "DRAINING")
            self.event("REASSIGNMENT", name, "PENDING", "DRAINING", same=True)
            self.event("REPLICA", f"replicas/{old}", "DRAINING", "RELEASING")
            self.event("REASSIGNMENT", name, "DRAINING", "RELEASING", same=True)
            self.event("REPLICA", f"replicas/{old}", "RELEASING", "RELEASED", "CONFIRMED")
            self.event("REASSIGNMENT", name, "RELEASING", "GRANTING", "CONFIRMED", same=True)
            self.event("REPLICA", f"replicas/{new}", "", "PLANNED", related=(accelerator,), same=True)
            self.event("REPLICA", f"replicas/{new}", "PLANNED", "STARTING", "GRANT", same=True)
            self.event("REASSIGNMENT", name, "GRANTING", "LOADING", "GRANTED")
            self.event("REPLICA", f"replicas/{new}", "STARTING", "ACTIVE", "READY")
            self.event("REASSIGNMENT", name, "LOADING", "SUCCEEDED", "DONE", numbers={"seconds": 0.4}, same=True)

    def reassignments(self) -> list[wire.Reassignment]:
        """The record of the two."""
        rows = []
        for uid, old, new, gain, observed in (
            ("a", "rollout-3", "trainer-5", 40.0, 31.5),
            ("b", "trainer-5", "rollout-6", 25.0, 12.0),
        ):
            rows.append(
                wire.Reassignment(
                    name=f"reassignments/{uid}", state=wire.REASSIGNMENT_STATE_SUCCEEDED, plan=f"plans/{uid}",
                    sources=[wire.ReassignmentSource(replica=f"replicas/{old}", confirmed=True)],
                    targets=[
                        wire.ReassignmentTarget(
                            replica=f"replicas/{new}",
                            spec=wire.ReplicaSpec(
                                role=wire.ROLE_TRAINER if "trainer" in new else wire.ROLE_ROLLOUT,
                                accelerators=[f"{NODE}/accelerators/2"],
                            ),
                        )
                    ],
                    reason=wire.Reason(
                        code="TRAINING_BOUND" if "trainer" in new else "ROLLOUT_BOUND",
                        text="the other side waits most of its time",
                        numbers={"predicted_gain_tokens_per_s": gain, "observed_gain_tokens_per_s": observed},
                    ),
                    create_time=wire.timestamp(EPOCH + 2.0), update_time=wire.timestamp(EPOCH + 3.0),
                )
            )  # fmt: skip
        return rows

    def versions(self) -> list[wire.WeightVersion]:
        """The three versions; 1 and 2 with their files."""
        rows = [
            wire.WeightVersion(
                name=self.version(n), version=wire.VersionRef(lineage=1, number=n), state=wire.VERSION_STATE_PUBLISHED,
                manifest=f"{RUN}/manifests/{n}" if n else "",
            )
            for n in range(3)
        ]  # fmt: skip
        if self.with_model:
            import safetensors.torch

            for n in (1, 2):
                state = {k: v.clone() for k, v in self.models[n].state_dict().items() if k != "lm_head.weight"}
                blob = self.blobs.put(f"tiny/weights/1-{n}/model.safetensors", safetensors.torch.save(state))
                rows[n].files.format = "safetensors"
                rows[n].files.shards.add(name="model.safetensors", blob=blob)
        return rows

    def write_seen(self) -> None:
        """What the driver and the live view wrote, and the trainer's metrics."""
        facts = {"train_run": RUN, "eval_start_run": "runs/eval-start", "eval_end_run": "runs/eval-end", "seed": 7}
        (self.folder / "demo.json").write_text(json.dumps(facts))
        samples = [
            {
                "t": EPOCH + i, "phase": "train", "run": RUN, "step": i // 2, "reward": 0.5,
                "queue": {"0": 4 - i, "1": i},
                "trainers": {"trainer-0": [0.0, 0.5 * i, 0.0, 0.0, 0.4 * i]},
                "engines": {"rollout-1": {"activity": "SERVING", "running": i % 2, "generated": 20 * i}},
            }
            for i in range(4)
        ]  # fmt: skip
        records.write_lines(self.folder / "samples.jsonl", samples)
        metrics = [
            {"t": EPOCH + n, "run": RUN, "step": n, "lineage": 1, "redo": redo, "loss": 0.1}
            for n, redo in ((2, False), (1, True), (1, False))
        ]
        records.write_lines(self.folder / "metrics" / "trainer-0.jsonl", metrics)

    def write(self, manifests, members, model_dir: Path) -> None:
        """All files."""
        out = self.folder / "records"
        run = wire.Run(
            name=RUN, kind=wire.RUN_KIND_TRAIN, group_size=2, state=wire.RUN_STATE_FINISHED, seed=7,
            policies=[wire.Policy(model=str(model_dir))], staleness=wire.StalenessPolicy(max_versions=2),
        )  # fmt: skip
        accelerators = [
            wire.Accelerator(
                name=f"{NODE}/accelerators/{i}",
                pool=(wire.POOL_CORE_TRAINING, wire.POOL_CORE_ROLLOUT, wire.POOL_HYBRID, wire.POOL_HYBRID)[i],
            )
            for i in range(4)
        ]
        replicas = [
            wire.Replica(name=f"replicas/{n}", generation=int(n.rpartition("-")[2]))
            for n in ("trainer-1", "rollout-2", "rollout-3", "rollout-4", "trainer-5", "rollout-6")
        ]
        for name, rows in (
            ("events", self.events),
            ("trajectories", self.trajectories),
            ("manifests", manifests),
            ("versions", self.versions()),
            ("reassignments", self.reassignments()),
            ("commands", []),
            ("replicas", replicas),
            ("accelerators", accelerators),
            ("workers", []),
            ("runs", [run]),
        ):
            records.write_lines(out / f"{name}.jsonl", [records.line(r) for r in rows])
        records.write_lines(out / "members.jsonl", members)
        self.write_seen()
        for who in sorted({f["who"] for f in self.facts}):
            mine = [f for f in self.facts if f["who"] == who]
            records.write_lines(self.folder / "history" / f"{who}.jsonl", mine)


def copy(source: Path, target: Path) -> Path:
    """A copy of a run's folder that refers to its own blobs."""
    shutil.copytree(source, target)
    for path in (target / "records").glob("*.jsonl"):
        path.write_text(path.read_text().replace(str(source), str(target)))
    for path in (target / "history").glob("*.jsonl"):
        path.write_text(path.read_text().replace(str(source), str(target)))
    return target


def replace_segment(folder: Path, trajectory: str, part: int, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Puts other columns in place of a segment's and makes every record agree with them: hashes, history, manifests."""
    store = BlobStore(str(folder / "blobs"))
    old = {}

    def in_record(rows: list[dict]) -> None:
        row = next(r for r in rows if r["name"] == trajectory)
        old.update(row["sequences"][0]["segments"][part]["blob"])

    edit(folder, "records/trajectories.jsonl", in_record)
    ref = wire.BlobRef(uri=old["uri"], sha256=old["sha256"], size_bytes=int(old["size_bytes"]))
    columns = {name: column.copy() for name, column in segment.decode(store.get(ref)).items()}
    change(columns)
    data = segment.encode(columns)
    key = ref.uri.removeprefix(f"{store.uri}/").replace(ref.sha256, hashlib.sha256(data).hexdigest())
    new = store.put(key, data)
    assert new.size_bytes == ref.size_bytes, "the size stands in the records too"
    for path in [*(folder / "records").glob("*.jsonl"), *(folder / "history").glob("*.jsonl")]:
        path.write_text(path.read_text().replace(ref.sha256, new.sha256))
    rehash(folder)


def rehash(folder: Path) -> None:
    """Freezes every manifest anew over its present members, as one who falsifies thoroughly would."""
    digests: dict = {}

    def gather(rows: list[dict]) -> None:
        for row in rows:
            digest = digests.setdefault(row["manifest"], hashlib.sha256())
            member = wire.ParseDict(row["member"], wire.ManifestMember())
            bits = struct.pack(">d", member.reward.value).hex()
            for sequence in member.sequences:
                for item in sequence.segments:
                    text = f"{member.trajectory} {member.attempt} {bits} {sequence.index} {item.first_position}"
                    digest.update(f"{text} {item.blob.sha256}\n".encode())

    edit(folder, "records/members.jsonl", gather)

    def put(rows: list[dict]) -> None:
        for row in rows:
            row["members_sha256"] = digests[row["name"]].hexdigest()

    edit(folder, "records/manifests.jsonl", put)


def edit(folder: Path, name: str, change: Callable[[list[dict]], list[dict] | None]) -> None:
    """Rewrites the JSON lines of `name` (relative to the run's folder) as `change` says."""
    path = folder / name
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    changed = change(rows)
    records.write_lines(path, rows if changed is None else changed)

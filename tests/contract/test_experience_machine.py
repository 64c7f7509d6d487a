"""All operations in random order on the real server, beside a model of plain Python that uses the pure staleness rule.

After every operation each trajectory is in exactly one place, the headers are the model's, and every prompt is done with,
outstanding, to be issued again, or ahead of the cursor. Batches are planned by the pure rule; none is ever over its bound.
"""

import asyncio
import uuid
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from laminar.experience.buffer import ExperienceBuffer
from laminar.experience.client import connect
from laminar.experience.partial import PartialPiece, PartialPool, PartialTurn
from laminar.experience.prompts import PromptPool
from laminar.experience.store import ExperienceStore
from laminar.policies.samplers import freshest_first
from laminar.policies.staleness import accept_late_submit, free_slots, may_readmit, plan_batch
from laminar.types import EvictionReason, FailureKind, Prompt, WeightVersion, sampled

NUM_PROMPTS, BATCH, GROUP_SIZE, BOUND, MAX_ATTEMPTS, MIN_GOOD = 400, 2, 2, 1, 3, 1
WORKERS = ("a", "b")
HOUR = 3600.0


@dataclass
class Group:
    """The model of an outstanding group."""

    admission: int
    prompt: int
    oldest: int
    newest: int
    owner: str
    last: str = ""
    expired: bool = False
    attempt: int = 1
    reissues: int = 0
    refills: int = 0
    state: str = "in_flight"
    done: dict = field(default_factory=dict)  # member -> (oldest, newest), or None if it failed
    claim: int = 1
    partials: dict = field(default_factory=dict)  # member -> (oldest, newest, tokens) of what a running member put by

    @property
    def good(self):
        return [versions for versions in self.done.values() if versions is not None]

    @property
    def survivors(self):
        return [*self.good, *((oldest, newest) for oldest, newest, _ in self.partials.values())]

    @property
    def floor(self):
        return min((oldest for oldest, _ in self.survivors), default=self.oldest)

    @property
    def missing(self):
        return tuple(member for member in range(GROUP_SIZE) if member not in self.done)


@dataclass
class Checkpoint:
    number: int
    frontier: object
    trained: int
    untrained: set  # prompts before the cursor that are not done with


class Machine(RuleBasedStateMachine):
    """Drives server and model. `exempt`: groups have no deadline (policy `mask`), and the bound only paces admission."""

    def __init__(self, runner, client, play, break_down, exempt=False, group_failure="shrink"):
        super().__init__()
        self.bound, self.exempt, self.group_failure = None if exempt else BOUND, exempt, group_failure
        self.min_good = GROUP_SIZE if group_failure == "drop" else MIN_GOOD
        self.call = runner.run
        self.play, self.break_down = play, break_down
        self.store = ExperienceStore(client, f"machine-{uuid.uuid4().hex[:12]}")
        self.pool, self.buffer = PromptPool(self.store), ExperienceBuffer(self.store)
        self.partials = PartialPool(self.store)
        self.groups, self.held, self.taken = {}, set(), []
        self.reissue, self.cursor, self.admissions = [], 0, 0
        self.lineage, self.published, self.unacked = 0, 0, []
        self.counts, self.done_with = Counter(), set()

    @initialize()
    def make(self):
        self.call(
            self.pool.configure(
                num_prompts=NUM_PROMPTS,
                prompts_per_step=BATCH,
                group_size=GROUP_SIZE,
                max_staleness=BOUND,
                max_attempts=MAX_ATTEMPTS,
                min_group_size=MIN_GOOD,
                max_bytes=10**9,
                bytes_per_group=100_000,
                max_epochs=1,
                data_seed=0,
                shuffle=False,
                exempt=self.exempt,
                group_failure=self.group_failure,
            )
        )
        self.call(self.pool.add_prompts([Prompt(str(i), "") for i in range(NUM_PROMPTS)]))
        self.call(self.buffer.restore(0, 0))
        self.checkpoint = Checkpoint(0, None, 0, set())

    @property
    def figures(self):
        return {
            "prompts_per_step": BATCH,
            "outstanding": len(self.groups) + len(self.held),
            "published": self.published,
        }

    @rule(worker=st.sampled_from(WORKERS), lag=st.integers(0, 2), most=st.integers(1, 5))
    def claim(self, worker, lag, most):
        engine = max(0, self.published - lag)
        claim = self.call(self.pool.claim(worker, WeightVersion(self.lineage, engine), most, HOUR))
        expected = []
        for group_id in [g for g, group in self.groups.items() if group.state == "in_flight" and not group.owner]:
            group = self.groups[group_id]
            if len(expected) < most and may_readmit(
                **self.figures, max_staleness=self.bound, engine=engine, oldest=group.floor
            ):
                survivors = group.survivors
                group.oldest = min([engine, *(oldest for oldest, _ in survivors)])
                group.newest = max([engine, *(newest for _, newest in survivors)])
                group.attempt += group.expired
                group.owner, group.expired = worker, False
                group.claim += 1
                expected.append(group_id)
        while len(expected) < most and free_slots(**self.figures, max_staleness=BOUND, engine=engine):
            expected.append(self.admit(worker, engine))
        assert [g.group_id for g in claim.groups] == expected
        for granted in claim.groups:
            group = self.groups[granted.group_id]
            assert (int(granted.prompt.prompt_id), granted.members) == (group.prompt, group.missing)
            assert (granted.attempt, granted.claim) == (group.attempt, group.claim)
            left = self.call(self.partials.adopt(granted.group_id, granted.claim))
            assert {m: p.num_tokens for m, p in left.items()} == {m: tokens for m, (_, _, tokens) in group.partials.items()}
        assert claim.refused == (None if len(expected) == most else "staleness")

    def admit(self, worker, engine):
        prompt, reissues = self.reissue.pop(0) if self.reissue else (self.cursor, 0)
        self.cursor += prompt == self.cursor and not reissues
        group_id = f"{self.admissions:08d}"
        self.groups[group_id] = Group(self.admissions, prompt, engine, engine, worker, reissues=reissues)
        self.admissions += 1
        self.counts.update(admitted=GROUP_SIZE, running=GROUP_SIZE)
        return group_id

    @precondition(lambda self: self.groups)
    @rule(worker=st.sampled_from(WORKERS))
    def renew(self, worker):
        listed = list(self.groups)
        lost = self.call(self.pool.renew(worker, listed, HOUR))
        mine = [g for g in listed if self.is_owner(self.groups[g], worker)]
        assert list(lost) == [g for g in listed if g not in mine]
        for group_id in mine:
            self.groups[group_id].owner, self.groups[group_id].expired = worker, False

    def is_owner(self, group, worker):
        return group.state == "in_flight" and (group.owner == worker or (group.expired and group.last == worker))

    @precondition(lambda self: self.groups)
    @rule()
    def let_all_leases_expire(self):
        self.call(self.pool.reap(ahead_seconds=2 * HOUR))
        for group_id, group in list(self.groups.items()):
            if group.state != "in_flight" or not group.owner:
                continue
            if group.attempt >= MAX_ATTEMPTS:
                self.counts.update(running=-len(group.missing), failed=len(group.missing))
                group.done |= dict.fromkeys(group.missing)
                self.complete(group_id)
            else:
                group.last, group.owner, group.expired = group.owner, "", True

    @precondition(lambda self: self.groups)
    @rule(worker=st.sampled_from(WORKERS))
    def give_back(self, worker):
        listed = list(self.groups)
        self.call(self.pool.give_back(worker, listed))
        for group in self.groups.values():
            if group.state == "in_flight" and group.owner == worker:
                group.owner, group.last, group.expired = "", "", False

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), member=st.integers(0, GROUP_SIZE - 1), claims_ago=st.sampled_from([0, 0, 0, 1]))
    def put_by(self, data, member, claims_ago):
        group_id = data.draw(st.sampled_from(sorted(self.groups)))
        group = self.groups[group_id]
        number = data.draw(st.integers(min(group.oldest, self.published), self.published))
        oldest, newest, tokens = group.partials.get(member, (number, number, 0))
        segment = sampled([1, 2, 3], [-1, -2, -3], WeightVersion(self.lineage, number))
        piece = PartialPiece(group_id, member, 0, group.claim - claims_ago, tokens, (PartialTurn(0, 5, (segment,)),))
        taken = group.state == "in_flight" and member not in group.done and not claims_ago
        assert self.call(self.partials.append([piece, piece])) == ["appended" if taken else "lost"] * 2
        if taken:
            group.partials[member] = (min(oldest, number), max(newest, number), tokens + 3)

    @rule(most=st.integers(1, 6))
    def owners_finish(self, most):
        owned = [group_id for group_id, group in self.groups.items() if group.state == "in_flight" and group.owner]
        for group_id in owned[:most]:
            group = self.groups[group_id]
            for member in group.missing:
                self.hand_in(group_id, group.owner, member, True, group.oldest, self.published)

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), worker=st.sampled_from(WORKERS), member=st.integers(0, GROUP_SIZE - 1), good=st.integers(0, 3))
    def submit(self, data, worker, member, good):
        group_id = data.draw(st.sampled_from(sorted(self.groups)))
        group = self.groups[group_id]
        oldest = data.draw(st.integers(min(group.oldest, self.published), self.published))
        newest = data.draw(st.integers(oldest, self.published))
        self.hand_in(group_id, worker, member, good > 0, oldest, newest)

    def hand_in(self, group_id, worker, member, good, oldest, newest):
        group = self.groups[group_id]
        versions = (f"{self.lineage}.{oldest}", f"{self.lineage}.{newest}")
        trajectory = self.play(group_id, member, *versions) if good else self.break_down(group_id, member, FailureKind.TOOL)
        outcome = self.call(self.buffer.submit(trajectory, worker))
        assert outcome == self.expected_outcome(group, worker, member, good, oldest)
        if outcome != "accepted":
            group.refills += outcome == "replay"
            return
        group.done[member] = (oldest, newest) if good else None
        group.partials.pop(member, None)
        self.counts.update({"running": -1, "buffered" if good else "failed": 1})
        if good:
            group.oldest, group.newest = min(group.oldest, oldest), max(group.newest, newest)
        if len(group.missing) + len(group.good) < self.min_good or not group.missing:
            self.complete(group_id)

    def expected_outcome(self, group, worker, member, good, oldest):
        if group.state != "in_flight" or member in group.done:
            return "duplicate"
        if self.is_owner(group, worker):
            refilled = not good and self.group_failure == "refill" and group.refills < GROUP_SIZE
            return "replay" if refilled else "accepted"
        if good and not self.exempt and self.published - oldest > BOUND:
            return "refused_stale"
        late = good and accept_late_submit(**self.figures, max_staleness=self.bound, holds_slot=True, oldest=oldest)
        return "accepted" if late else "refused_lost"

    def complete(self, group_id):
        group = self.groups[group_id]
        group.owner = ""
        if len(group.good) >= self.min_good:
            group.state = "ready"
            group.oldest = min(oldest for oldest, _ in group.good)
            group.newest = max(newest for _, newest in group.good)
        else:
            self.leave(group_id, "failed")
            self.done_with.add(group.prompt)

    def leave(self, group_id, bucket):
        group = self.groups.pop(group_id)
        self.counts["running"] -= len(group.missing)
        self.counts["taken" if group.state == "taken" else "buffered"] -= len(group.good)
        self.counts[bucket] += len(group.missing) + len(group.good)
        if group.state == "taken":
            self.held.add(group_id)

    @precondition(lambda self: self.groups and not self.taken)
    @rule()
    def take(self):
        snapshot = self.call(self.buffer.peek())
        plan = plan_batch(
            snapshot.headers,
            trained_on=self.published,
            prompts_per_step=BATCH,
            max_staleness=BOUND,
            order=freshest_first,
            end_of_data=snapshot.end_of_data,
        )
        assert plan.over_age == ()
        for _ in range(2 if plan.chosen else 0):
            taken = self.call(self.buffer.take(self.lineage, self.published + 1, plan.chosen))
            assert taken == plan.chosen
        for group_id in plan.chosen:
            group = self.groups[group_id]
            assert self.exempt or self.published - group.oldest <= BOUND
            group.state = "taken"
            self.counts.update(buffered=-len(group.good), taken=len(group.good))
        self.taken = list(plan.chosen)

    @precondition(lambda self: self.groups and not self.taken)
    @rule()
    def claim_finish_and_train(self):
        self.claim("a", 0, 4)
        self.owners_finish(6)
        self.take()
        if self.taken:
            self.publish()

    @precondition(lambda self: self.taken)
    @rule()
    def publish(self):
        alive = [group_id for group_id in self.taken if group_id in self.groups]
        fetched = self.call(self.buffer.fetch(alive))
        for group_id, members in zip(alive, fetched, strict=True):
            group = self.groups.pop(group_id)
            assert [t.member for t in members] == [m for m, versions in sorted(group.done.items()) if versions is not None]
            self.counts.update(taken=-len(group.good), trained=len(group.good))
            assert group.prompt not in self.done_with
            self.done_with.add(group.prompt)
        self.published += 1
        self.unacked.append(self.published)
        self.taken, self.held = [], set()
        for _ in range(2):
            self.call(self.buffer.publish(self.lineage, self.published))

    @precondition(lambda self: self.unacked)
    @rule()
    def ack(self):
        for step in self.unacked:
            self.call(self.buffer.ack(self.lineage, step))
        self.unacked = []

    @precondition(lambda self: self.groups)
    @rule(data=st.data(), reissue=st.booleans())
    def evict(self, data, reissue):
        ids = data.draw(st.lists(st.sampled_from(sorted(self.groups)), max_size=2, unique=True))
        assert self.call(self.buffer.evict([*ids, "gone"], EvictionReason.STALE, reissue)) == tuple(ids)
        for group_id in ids:
            group = self.groups[group_id]
            self.leave(group_id, "evicted")
            if reissue and group.reissues < 8:
                self.reissue.append((group.prompt, group.reissues + 1))
            else:
                self.done_with.add(group.prompt)

    @precondition(lambda self: any(group.state != "in_flight" for group in self.groups.values()))
    @rule(data=st.data())
    def filter(self, data):
        done = sorted(group_id for group_id, group in self.groups.items() if group.state != "in_flight")
        ids = data.draw(st.lists(st.sampled_from(done), max_size=2, unique=True))
        assert self.call(self.buffer.filter(ids)) == tuple(ids)
        for group_id in ids:
            self.done_with.add(self.groups[group_id].prompt)
            self.leave(group_id, "filtered")

    @precondition(lambda self: self.published > self.checkpoint.number)
    @rule()
    def save_checkpoint(self):
        frontier = self.call(self.buffer.frontier())
        untrained = [(group.prompt, group.reissues) for group in self.groups.values()] + self.reissue
        assert frontier.pending == tuple((0, prompt, reissues) for prompt, reissues in untrained)
        assert (frontier.number, frontier.cursor, frontier.next_admission) == (self.published, self.cursor, self.admissions)
        self.checkpoint = Checkpoint(self.published, frontier, self.counts["trained"], {p for p, _ in untrained})

    @precondition(lambda self: self.published > self.checkpoint.number)
    @rule(deleted=st.sampled_from(["", "", "headers", "outstanding", "leases", "unowned"]))
    def restore(self, deleted):
        """A new lineage at the checkpoint; perhaps somebody deleted a key before."""
        if deleted:
            self.call(self.store.client.delete(self.store.key(deleted)))
        saved = self.checkpoint
        frontier_cursor = saved.frontier.cursor if saved.frontier else 0
        self.lineage += 1
        for _ in range(2):
            report = self.call(self.buffer.restore(self.lineage, saved.number, saved.frontier))
        kept = {
            group_id: group
            for group_id, group in self.groups.items()
            if group.state != "in_flight"
            and group.newest <= saved.number
            and (group.prompt >= frontier_cursor or group.prompt in saved.untrained)
            and deleted != "headers"
        }
        assert (report.kept, report.orphaned) == (len(kept), len(self.groups) - len(kept))
        untrained = saved.untrained | set(range(frontier_cursor, self.cursor))
        to_issue = untrained - {group.prompt for group in kept.values()}
        pending = saved.frontier.pending if saved.frontier else ()
        counts_of = {prompt: reissues for _, prompt, reissues in pending}
        ordered = [prompt for _, prompt, _ in pending] + list(range(frontier_cursor, self.cursor))
        self.reissue = [(prompt, counts_of.get(prompt, 0)) for prompt in ordered if prompt in to_issue]
        assert report.reissued == len(self.reissue)
        self.done_with = set(range(self.cursor)) - untrained
        for group in kept.values():
            if group.state == "taken":
                group.state = "ready"
                self.counts.update(taken=-len(group.good), buffered=len(group.good))
        for group_id in list(self.groups):
            if group_id not in kept:
                self.leave(group_id, "evicted")
        self.counts["evicted"] += self.counts["trained"] - saved.trained
        self.counts["trained"] = saved.trained
        self.published, self.unacked, self.taken, self.held = saved.number, [], [], set()

    @invariant()
    def server_and_model_agree(self):
        if not hasattr(self, "checkpoint"):
            return
        snapshot = self.call(self.buffer.peek())
        counters = snapshot.counters
        assert counters.is_balanced
        plain = ("admitted", "running", "buffered", "taken", "trained", "filtered")
        seen = {name: getattr(counters, name) for name in plain}
        seen |= {"evicted": counters.num_evicted, "failed": counters.num_failed}
        assert seen == {name: self.counts[name] for name in seen}
        assert [
            (h.group_id, h.state, h.oldest, h.newest, h.owner, h.admission, h.max_staleness) for h in snapshot.headers
        ] == [(i, g.state, g.oldest, g.newest, g.owner, g.admission, self.bound) for i, g in self.groups.items()]
        assert snapshot.num_held == len(self.held)
        if not self.groups and not self.unacked:
            assert snapshot.reserved_bytes == 0

    @invariant()
    def every_prompt_is_in_one_place(self):
        places = [*self.done_with, *(group.prompt for group in self.groups.values()), *(p for p, _ in self.reissue)]
        assert sorted(places) == list(range(self.cursor))


VARIANTS = [
    {},
    {"exempt": True, "group_failure": "refill"},
    {"group_failure": "drop"},
]


def drive(valkey, maker, variant, max_examples, steps, derandomize):
    with asyncio.Runner() as runner:
        client = runner.run(connect(valkey.url))
        run_state_machine_as_test(
            lambda: Machine(runner, client, maker.play, maker.break_down, **variant),
            settings=settings(
                max_examples=max_examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=derandomize,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        runner.run(client.aclose())


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_trajectory_is_in_one_place_under_any_order_of_operations(valkey, trajectory_maker, variant):
    drive(valkey, trajectory_maker, variant, 8 if variant else 12, 40, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_trajectory_is_in_one_place_in_500_long_random_runs(valkey, trajectory_maker, variant):
    """New runs each time; a failure prints the shortest run that shows it."""
    drive(valkey, trajectory_maker, variant, 500, 60, derandomize=False)

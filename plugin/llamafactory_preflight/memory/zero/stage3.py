"""DeepSpeed's ZeRO-3 on paper: which parameters are gathered when.

Source: deepspeed 0.18.4, runtime/zero/{partitioned_param_coordinator,parameter_offload,partition_parameters}.py.
The first forward and all that follows record in which order modules run; once the next forward begins, parameters are
fetched ahead, and those that are used again soon stay. A module out of order ends that until the record is made anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from llamafactory_preflight.memory.paper.ledger import Ledger, Storage
from llamafactory_preflight.memory.paper.module_hooks import BORROWERS
from llamafactory_preflight.memory.sharding import Key, Parameter
from llamafactory_preflight.parallel.zero import ZeroPlan


NEVER = -(10**10)
CONTAINER = ("container", None)
"""Stands in the order of modules for one without a weight of its own."""
Visit = tuple[str, Key | None]
"""A module in the order of modules, and the weight it has."""


def partition(parameter: Parameter, world: int) -> int:
    """Elements of a parameter that each rank keeps, padding included."""
    return -(-parameter.numel // world)


class Gathered:
    """A parameter and whether its whole tensor is on the card."""

    __slots__ = ("active", "available", "handle", "numel", "on_host", "part", "persists", "storage")

    def __init__(self, parameter: Parameter, plan: ZeroPlan, world: int) -> None:
        self.numel, self.part = parameter.numel, partition(parameter, world)
        self.persists = parameter.numel <= plan.persistence_threshold
        self.on_host = plan.offload_param != "none" and (parameter.trained or not self.persists)
        self.available = False
        self.active: set[tuple[str, Key]] = set()
        self.handle: _Fetch | None = None
        self.storage: Storage | None = None


class _Fetch:
    """Several parameters gathered in one flat tensor, out of which each is copied when the first is waited for.

    Of a parameter that is gathered alone `flat` is what communication reads.
    """

    def __init__(self, members: Sequence[Gathered], flat: Storage | None) -> None:
        self.members, self.flat, self.done = members, flat, False


class Coordinator:
    """Gathers parameters around the modules that use them.

    Args:
        ledger: Books every byte.
        everything: All parameters, in order.
        plan: DeepSpeed's settings.
        world: Ranks.
        item: Bytes of an element of the model.
    """

    def __init__(
        self, ledger: Ledger, everything: Sequence[Parameter], plan: ZeroPlan, *, world: int, item: int
    ) -> None:
        self.ledger, self.plan, self.world, self.item = ledger, plan, world, item
        self.states = {parameter.key: Gathered(parameter, plan, world) for parameter in everything}
        self.members = {key: self._members(key) for key in self.states}
        self.order: list[Visit] = []
        self.visits: list[tuple[Gathered, ...]] = []
        self.recording = self.complete = False
        self.step_number = self.num_available = 0
        self.queue: deque[tuple[Gathered, int]] = deque()
        self.fetched: dict[Gathered, int] = {}
        self.uses: dict[Gathered, list[int]] = {}
        self.passed: list[int] = []
        self.borrowed: set[Key] = set()
        self.going: dict[tuple[str, Gathered, int], bool] = {}
        self.held: dict[Key, list[Storage | None]] = {key: [] for key in self.states}

    def begin_forward(self) -> None:
        """reset_step: a recorded order is complete when the next forward begins; a lost one is recorded anew."""
        self._drop_fetches()
        if self.recording:
            self.recording, self.complete = False, True
            self._index_uses()
        elif not self.complete:
            self.recording = True
        self.queue = deque((state, number) for number, visit in enumerate(self.visits) for state in visit)
        self.fetched = {}
        self.step_number = self.num_available = 0

    def _index_uses(self) -> None:
        """At which steps of the order each parameter is used, and the elements of all modules before each step."""
        self.passed = [0, *accumulate(sum(state.numel for state in visit) for visit in self.visits)]
        self.uses = {}
        for number, visit in enumerate(self.visits):
            for state in visit:
                self.uses.setdefault(state, []).append(number)

    def _drop_fetches(self) -> None:
        """_clean_inflight_param_registry: waits for what is on its way and lets it go."""
        for state in self.states.values():
            if state.handle is not None:
                self._wait(state)
                self._release(state)

    def _expect(self, visit: Visit) -> None:
        """trace_prologue: a module that the order does not have at this step makes it worthless."""
        if self.recording:
            self.order.append(visit)
        if not self.complete or (self.step_number < len(self.order) and self.order[self.step_number] == visit):
            return
        self.complete = False
        self.order, self.visits = [], []
        self.queue.clear()
        self.fetched = {}
        self._drop_fetches()

    def enter(self, module: str, key: Key) -> None:
        """fetch_sub_module: gathers what the module needs, and what comes next."""
        members = self.members[key]
        self._expect((module, key))
        if module in BORROWERS and key not in self.borrowed:  # nobody knows yet that it will read this weight
            self._pass(members)
            return
        missing = [state for state in members if not state.available and state.handle is None]
        if missing:
            self._gather(missing)
        for state in members:
            state.active.add((module, key))
            if state.handle is not None:
                self._wait(state)
        self._pass(members)

    def enter_container(self) -> None:
        """A module without a weight fetches ahead like any other."""
        self._expect(CONTAINER)
        self._pass(())

    def _pass(self, members: tuple[Gathered, ...]) -> None:
        if self.complete:
            self._prefetch(members)
        elif self.recording:
            self.visits.append(members)
        self.step_number += 1

    def leave(self, module: str, key: Key) -> None:
        """release_sub_module."""
        for state in self.members[key]:
            state.active.discard((module, key))
            if state.available and not state.active and (not self.complete or self._may_go(module, state)):
                self._release(state)

    def borrow(self, key: Key) -> None:
        """ZeROOrderedDict.__getitem__: the first time it is found out as it is read, and gathered with a copy."""
        state = self.states[key]
        if not state.available:
            self.borrowed.add(key)
            flat = self._storage(state.part * self.world)
            state.storage = self._storage(state.numel)
            state.available, state.handle = True, None
            del flat

    def hold(self, key: Key) -> None:
        """A function keeps a view of what is gathered now, and with it all of it, whether it is let go or not."""
        self.held[key].append(self.states[key].storage)

    def let_go(self, key: Key) -> None:
        """The youngest function that kept a view is gone."""
        self.held[key].pop()

    def release_leftovers(self) -> None:
        """After the backward, from DeepSpeed 0.19.6 on: what nobody let go, as its input has no gradient."""
        for state in self.states.values():
            if state.available and not state.persists:
                state.active.clear()
                self._release(state)

    def release_all(self) -> None:
        """Before the optimizer's step."""
        for state in self.states.values():
            state.active.clear()
            state.available, state.handle, state.storage = False, None, None

    def gather_persistent(self) -> None:
        """After it: small parameters stay gathered."""
        persistent = [state for state in self.states.values() if state.persists]
        if persistent:
            self._gather(persistent)
        for state in self.states.values():
            self._wait(state)

    def _members(self, key: Key) -> tuple[Gathered, ...]:
        """A module's parameters: its weight and its bias, or a sparse layer's experts and router."""
        layer, name = key
        others = ("down", "router") if name == "gate_up" else (f"{name}.bias",)
        found = (self.states.get((layer, other)) for other in others)
        return (self.states[key], *(state for state in found if state is not None))

    def _prefetch(self, members: Sequence[Gathered]) -> None:
        queue, fetched = self.queue, self.fetched
        needed = 0
        for state in members:
            needed += fetched.get(state, NEVER) < self.step_number
        if needed:
            passed: set[Gathered] = set()
            while queue and len(passed) < needed:
                state, number = queue.popleft()
                fetched[state] = number
                passed.add(state)
        room = min(self.plan.max_live_parameters - self.num_available, self.plan.prefetch_bucket_size)
        ahead: list[Gathered] = []
        numel = 0
        while queue and numel < room and self._is_at_hand(queue[0][0]):
            state, number = queue.popleft()
            fetched[state] = max(fetched.get(state, NEVER), number)
            if not state.available and state.handle is None and state not in ahead:
                ahead.append(state)
                numel += state.numel
        if ahead:
            self._gather(ahead)

    def _is_at_hand(self, state: Gathered) -> bool:
        """Whether a parameter can be gathered ahead: one that still has to be read first cannot."""
        return True

    def _may_go(self, module: str, state: Gathered) -> bool:
        """What __params_to_release says of a module at a point of the step, and says again in every later step."""
        point = module, state, self.step_number
        if point not in self.going:
            self.going[point] = self._is_done_with(state)
        return self.going[point]

    def _is_done_with(self, state: Gathered) -> bool:
        """Whether a parameter is neither small, nor fetched nor used again within the reuse distance."""
        if state.persists or self.fetched.get(state, NEVER) > self.step_number:
            return False
        uses = self.uses[state]
        after = bisect_left(uses, self.step_number)
        if after == len(uses):
            return True
        return self.passed[uses[after]] - self.passed[self.step_number] >= self.plan.max_reuse_distance

    def _release(self, state: Gathered) -> None:
        state.available, state.storage = False, None
        self.num_available -= state.numel

    def _gather(self, states: Sequence[Gathered]) -> None:
        """all_gather_coalesced: with one rank a copy from main memory, or none at all."""
        self.num_available += sum(state.numel for state in states)
        if self.world == 1:
            for state in states:
                state.storage = self._storage(state.numel) if state.on_host else None
                state.handle = _Fetch((), None)
            return
        parts = sum(state.part for state in states)
        flat = self._storage(parts * self.world)
        copies = self._storage(sum(state.part for state in states if state.on_host))
        if len(states) == 1:  # gathered in place; communication holds the copy of this rank's shard until it is done
            states[0].storage, fetch = flat, _Fetch((), copies)
        else:
            fetch = _Fetch(tuple(states), flat)
        del copies
        for state in states:
            state.handle = fetch

    def _wait(self, state: Gathered) -> None:
        fetch = state.handle
        if fetch is None:
            return
        if not fetch.done:
            for member in fetch.members:
                member.storage = self._storage(member.numel)
                member.available = True
            fetch.done, fetch.members = True, ()
        state.available, state.handle = True, None

    def _storage(self, numel: int) -> Storage:
        return Storage(self.ledger, numel * self.item, "weights")

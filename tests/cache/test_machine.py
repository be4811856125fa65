"""PagedKVCache against a plain dictionary of tensors, in random operations."""

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fp8attn import OutOfPagesError, PagedKVCache

DIM = 64
PLAIN = {"key_dtype": "e4m3", "rotate_keys": False}  # small integers stay what they are


class CacheMachine(RuleBasedStateMachine):
    """Random appends, truncations, selections, copies and reads. Values are small integers times small powers of two,
    which E4M3 holds exactly under any scale they lead to, so what is read must be what was written, to the bit,
    whatever happened in between.
    """

    @initialize(seqs=st.integers(1, 3), fixed=st.booleans())
    def make(self, seqs, fixed):
        self.cache = PagedKVCache(1, DIM, num_seqs=seqs, num_pages=12 if fixed else None, **PLAIN)
        self.fixed = fixed
        self.held = {seq: (torch.empty(0, 1, DIM), torch.empty(0, 1, DIM)) for seq in range(seqs)}

    @rule(data=st.data(), power=st.integers(0, 6), seed=st.integers(0, 2**31))
    def append(self, data, power, seed):
        lengths = [data.draw(st.sampled_from([0, 1, 1, 2, 17, 127, 128, 129, 260])) for _ in self.held]
        generator = torch.Generator().manual_seed(seed)
        k, v = (torch.randint(-15, 16, (sum(lengths), 1, DIM), generator=generator) * 2.0**power for _ in range(2))
        try:
            self.cache.append(0, k, v, lengths=lengths)
        except OutOfPagesError:
            assert self.fixed
            return
        for seq, (a, b) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
            self.held[seq] = (torch.cat([self.held[seq][0], a]), torch.cat([self.held[seq][1], b]))

    @rule(data=st.data())
    def truncate(self, data):
        lengths = [data.draw(st.integers(0, len(k) + 1)) for k, _ in self.held.values()]
        self.cache.truncate(lengths)
        self.held = {seq: (k[:n], v[:n]) for (seq, (k, v)), n in zip(self.held.items(), lengths, strict=True)}

    @rule(data=st.data())
    def select(self, data):
        indices = data.draw(st.lists(st.integers(0, len(self.held) - 1), min_size=1, max_size=4))
        self.cache.select(indices)
        self.held = {new: self.held[old] for new, old in enumerate(indices)}

    @rule(data=st.data())
    def copy(self, data):
        if len(self.held) > 1:
            source, target = data.draw(st.permutations(range(len(self.held))))[:2]
            length = data.draw(st.integers(0, len(self.held[source][0])))
            self.cache.copy(source, target, length)
            self.held[target] = tuple(x[:length] for x in self.held[source])

    @rule(length=st.integers(0, 400))
    def reserve(self, length):
        try:
            self.cache.reserve(length)
        except OutOfPagesError:
            assert self.fixed

    @invariant()
    def reads_what_was_written(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.lengths == tuple(len(k) for k, _ in self.held.values())
        assert self.cache.pages(0).cache_seqlens.tolist() == list(self.cache.lengths)
        for seq, (k, v) in self.held.items():
            got_k, got_v = self.cache.read(0, seq)
            assert torch.equal(got_k, k) and torch.equal(got_v, v)

    @invariant()
    def books_balance(self):
        if not hasattr(self, "cache"):
            return
        counts = [0] * self.cache.num_pages
        for table in self.cache.table.tables:
            assert len(set(table)) == len(table)
            for page in table:
                counts[page] += 1
        assert counts == self.cache.table.references
        assert sorted(self.cache.table.free) == [page for page, count in enumerate(counts) if not count]


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

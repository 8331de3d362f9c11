"""A layer with two tiers of KV over some rows, driven step by step, and what its hot buffers must hold (C23)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.reference.attention import KvCache, PagedKv
from forebay.ops.reference.tiers import TieredKv, TierLayout, TierStep

ROWS, PAGE, PAGES_PER_ROW = 4, 4, 16
TOKENS = PAGE * PAGES_PER_ROW
NUM_PAGES = ROWS * PAGES_PER_ROW + 1
NUM_RESIDENT = 8


@dataclass
class DictRow:
    """The hot buffer of a row as a dictionary: by column a position, and the length at its last use."""

    num_columns: int
    held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def swap_in(self, wanted: list[list[int]], newest: set[int], now: int) -> int:
        """Return how many positions are read from the host tier."""
        there = {position for position, _ in self.held.values()}
        used = {position for own in wanted for position in own} - newest
        self.held = {column: (at, now if at in used else last) for column, (at, last) in self.held.items()}
        loads = 0
        for own in wanted:
            for position in own:
                if position in there or position in newest:
                    continue
                loads += 1
                ages = {c: self.held[c][1] if c in self.held else 0 for c in range(self.num_columns)}
                column = min(ages, key=lambda c: (ages[c], c))
                if ages[column] < now:
                    there.discard(self.held[column][0] if column in self.held else -1)
                    self.held[column] = (position, now)
                    there.add(position)
        return loads


class TierCase:
    """`ROWS` rows and the padding row, whose KV is a number that tells the location in full KV."""

    def __init__(self, ops: Ops, num_columns: int, *, int8: bool = False, has_values: bool = False) -> None:
        """`has_values`: the values are no part of the keys, as they are of latent attention."""
        self.ops, rows = ops, ROWS + 1
        hot_base = NUM_RESIDENT * PAGE
        layout = TierLayout(num_columns, PAGE, hot_base, hot_base + rows * (num_columns + PAGE) + 3)
        self.has_values = has_values
        self.layout, size = layout, layout.host_base + NUM_PAGES * PAGE
        k = torch.full((size, 1, 3), -1, dtype=torch.int8 if int8 else torch.float32)
        scale = torch.full((size, 1), -1.0) if int8 else None
        self.tiers = TieredKv(
            KvCache(k, k.clone() if has_values else k[..., :2], scale, scale),
            torch.full((rows, num_columns), -1, dtype=torch.int32),
            torch.zeros(rows, num_columns, dtype=torch.int32),
        )
        self.active = torch.tensor([0] + [1] * ROWS, dtype=torch.int32)
        self.newest = torch.full((rows, PAGE), -1, dtype=torch.int32)
        self.counts = torch.zeros(2, dtype=torch.int64)
        table = torch.arange(rows * PAGES_PER_ROW, dtype=torch.int32).view(rows, PAGES_PER_ROW) - PAGES_PER_ROW + 1
        self.page_table = table.clamp(min=0)
        self.page_map = torch.zeros(NUM_PAGES, dtype=torch.int32)
        self.lens = [0] * rows
        self.model = [DictRow(num_columns) for _ in range(rows)]

    def location(self, row: int, position: int) -> int:
        return int(self.page_table[row, position // PAGE]) * PAGE + position % PAGE

    def write(self, place: int, row: int, position: int) -> None:
        """Store the KV of a position at a location of the tiers."""
        k, scale = self.tiers.kv.k, self.tiers.kv.k_scale
        number = self.location(row, position)
        k[place] = number if scale is None else number % 100
        if self.has_values:
            self.tiers.kv.v[place] = -number
        if scale is not None:
            scale[place] = number

    def read(self, place: int) -> int:
        k, scale = self.tiers.kv.k, self.tiers.kv.k_scale
        if self.has_values:
            assert int(self.tiers.kv.v[place, 0, 0]) == -int(k[place, 0, 0]), "keys and values are of two tokens"
        if scale is None:
            return int(k[place, 0, 0])
        number = int(scale[place, 0])
        assert int(k[place, 0, 0]) == number % 100, "codes and scale are of two tokens"
        return number

    def prompt(self, row: int, length: int, *, resident: int = 0) -> None:
        """Let a row have a prompt, of which the first `resident` pages have copies."""
        self.lens[row] = length
        for position in range(length):
            self.write(self.layout.host_base + self.location(row, position), row, position)
        for page in range(resident):
            copy = 1 + page
            self.page_map[self.page_table[row, page]] = copy
            for inside in range(PAGE):
                self.write(copy * PAGE + inside, row, page * PAGE + inside)

    def step(self, widths: dict[int, int]) -> tuple[PagedKv, Tensor]:
        """Let rows compute so many tokens each, whose KV is stored in both tiers."""
        rows = list(widths)
        positions = [self.lens[row] + i for row in rows for i in range(widths[row])]
        owners = [row for row in rows for _ in range(widths[row])]
        locations = torch.tensor([self.location(*at) for at in zip(owners, positions, strict=True)])
        q_start = torch.tensor([0, *widths.values()], dtype=torch.int32).cumsum(0).int()
        for row in rows:
            self.lens[row] += widths[row]
        paged = PagedKv(
            page_table=self.page_table,
            rows=torch.tensor(rows, dtype=torch.int32),
            q_start=q_start,
            seq_lens=torch.tensor([self.lens[row] for row in rows], dtype=torch.int32),
            page_size=PAGE,
            out_cache_loc=locations,
        )
        at = torch.tensor(positions)
        state = self.page_map, self.active, self.newest, self.layout
        on_device, on_host = self.ops.tiers.bind_newest(locations, at, paged.rows, q_start, *state)
        for places in (on_device, on_host):
            for place, row, position in zip(places.tolist(), owners, positions, strict=True):
                self.write(place, row, position)
        self.places = on_device, on_host
        return paged, at

    def tier_step(self) -> TierStep:
        return TierStep(
            layout=self.layout,
            page_map=self.page_map,
            active=self.active,
            newest=self.newest,
            device_loc=self.places[0],
            host_loc=self.places[1],
            counts=self.counts,
        )

    def swap_in(self, paged: PagedKv, wanted: list[list[int]], width: int) -> PagedKv:
        """Swap the wanted positions of each token in; there are `width` columns."""
        selected = torch.tensor([own + [-1] * (width - len(own)) for own in wanted], dtype=torch.int32)
        counts = torch.tensor([len(own) for own in wanted], dtype=torch.int32)
        return self.ops.tiers.swap_in(selected.view(-1, width), counts, paged, self.tiers, self.tier_step())

    def check(self, paged: PagedKv, wanted: list[list[int]], width: int) -> None:
        """Swap in, and compare what is read, where it is read from, and what was loaded with the dictionary."""
        before = self.counts.clone()
        found = self.swap_in(paged, wanted, width)
        starts, loads = paged.q_start.tolist(), 0
        for i, row in enumerate(paged.rows.tolist()):
            own, last = wanted[starts[i] : starts[i + 1]], self.lens[row]
            newest = {at for at in self.newest[row].tolist() if at >= 0}
            if self.active[row]:
                loads += self.model[row].swap_in(own, newest, last - len(own))
            for token, chosen in zip(range(starts[i], starts[i + 1]), own, strict=True):
                places = found.page_table[token].tolist()
                assert places[len(chosen) :] == [-1] * (width - len(chosen))
                assert [self.read(place) for place in places[: len(chosen)]] == [
                    self.location(row, position) for position in chosen
                ]
            held = {c: at for c, (at, _) in self.model[row].held.items()}
            expected = [held.get(c, -1) for c in range(self.layout.num_columns)]
            assert self.tiers.positions[row].tolist() == expected
        assert int(self.counts[1] - before[1]) == loads
        assert found.one_each
        assert found.page_size == 1
        assert found.seq_lens.tolist() == [len(own) for own in wanted]

    def admit(self, row: int, length: int) -> None:
        """Give the row to another request, which has a prompt and decodes from now on."""
        self.tiers.positions[row], self.tiers.last_used[row], self.newest[row] = -1, 0, -1
        self.model[row] = DictRow(self.layout.num_columns)
        self.page_table[row] = self.page_table[row][torch.randperm(PAGES_PER_ROW)]
        self.prompt(row, length)

    def reject(self, row: int, count: int) -> None:
        """The last `count` tokens of the row were draft tokens, and are not accepted."""
        self.lens[row] -= count


def random_steps(case: TierCase, seed: int, num_steps: int, *, top_k: int, most_tokens: int) -> None:
    """Drive a case with random rows, widths, selections, rejections and new requests, and check each step."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for row in range(1, ROWS + 1):
        case.prompt(row, rng.randint(1, TOKENS // 2))
    for _ in range(num_steps):
        for row in range(1, ROWS + 1):
            if case.lens[row] + most_tokens > TOKENS or rng.random() < 0.02:
                case.admit(row, rng.randint(1, TOKENS // 2))
        chosen = rng.sample(range(1, ROWS + 1), rng.randint(1, ROWS))
        widths = {row: rng.randint(1, most_tokens) for row in chosen}
        paged, positions = case.step(widths)
        wanted = []
        for position in positions.tolist():
            # Close to the last token more often, so that queries of a step share what they read, and steps, too.
            seen = range(position + 1) if rng.random() < 0.5 else range(max(0, position - 2 * top_k), position + 1)
            wanted.append(sorted(rng.sample(seen, min(top_k, len(seen)))))
        case.check(paged, wanted, top_k)
        for row, width in widths.items():
            case.reject(row, rng.randint(0, width - 1))

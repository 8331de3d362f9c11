"""How wide decode steps are: the width that pays, 1 among them. Outside the scheduler, and without a clock of its own.

Widths are compared by how much time they save, by the number of running requests: what a step's tokens are worth is the
time that they would have taken at width 1, and its gain is that less the time it took.

What `auto` can lose. Each width w > 1 has a moving average E of its steps' gains, from 0, with weight a for the
newest, and is chosen only while E > 0. A step moves E by a x (gain - E). So all gains of a width together are E / a
and the sum of the E that its steps found. That sum has nothing negative from steps that were chosen, whatever comes
and however often it changes: by the time a width is given up it has lost no more than it had gained. Only trials,
steps of a width that is not the chosen one, can lose. They are paid for in advance: of what each step's tokens are
worth `EXPLORATION_SHARE` is set aside. A trial waits until the expected loss is there. The actual loss is subtracted;
the balance may become negative. So `auto` loses that share at most, but for the last trial, and as far as plain
steps take what they took before. A number of running requests that is new begins with the averages of the nearest
one: where those mislead, E is moved from there to where it belongs, which takes some dozen steps.

A first look at a width costs little where steps are cheap and is rare where they are not, which a number of steps could
not say: at one running request a wider step without a right guess costs a fifteenth more, at sixty-four up to twice.
"""

from __future__ import annotations

from copy import copy
from typing import Final, NamedTuple

from forebay.config.engine_config import SpeculationOptions
from forebay.requests.updates import SpeculationReport

EXPLORATION_SHARE: Final = 0.015  # of what the time would be without guesses: what trials may lose
MOST_SAVED_STEPS: Final = 4.0  # of width 1: what is set aside for trials at most
STEPS_BETWEEN_TRIALS: Final = 4
FIRST_STEPS: Final = 4  # of width 1, before anything else is tried
FIRST_CREDIT_STEPS: Final = 1  # of width 1: what the first trial of all need not wait for
FEW_STEPS: Final = 3  # of a width: no ground to choose it
MEMORY_STEPS: Final = 32  # 1 / a
PLAIN_SHARE: Final = 0.01  # of the speed, that these may cost
PLAIN_MEMORY_STEPS: Final = 8  # of width 1, which are fewer where another width is taken
SWITCH_GAIN: Final = 1.03  # how much faster a width must be to take the place of another
OUTLIER: Final = 1.2  # times what its tokens would take one by one: a step that took more was disturbed, and counts so
RECENT_STEPS: Final = 512  # what the exported figures are about
PLAIN_STEPS: Final = 64  # of other widths, behind which one of width 1 tells what they gain: at most, or an eighth


class Pace:
    """Moving averages, over the steps of one width, of what their tokens are worth and of the time they took."""

    def __init__(self, memory_steps: int = MEMORY_STEPS) -> None:
        self.num_steps = 0
        self.worth_s = 0.0
        self.seconds = 0.0
        self._weight = 1 / memory_steps

    def ended(self, worth_s: float, seconds: float) -> None:
        """Add a finished step to the moving averages: the seconds it took, and the seconds that its tokens are
        worth."""
        self.num_steps += 1
        self.worth_s += (worth_s - self.worth_s) * self._weight
        self.seconds += (seconds - self.seconds) * self._weight

    @property
    def gain_s(self) -> float:
        """E of the module's text."""
        return self.worth_s - self.seconds

    @property
    def speedup(self) -> float:
        return self.worth_s / self.seconds if self.seconds else 1.0

    @property
    def step_s(self) -> float:
        """The average as of now, without the 0 that it began with."""
        return self.seconds / (1 - (1 - self._weight) ** self.num_steps) if self.num_steps else 0.0


class Bucket:
    """Measurements of steps with about as many running requests, and the width that they take. It begins with the
    averages of `nearest`, except for steps of width 1, which come first."""

    def __init__(self, widths: tuple[int, ...], nearest: Bucket | None = None) -> None:
        self.widths = widths
        learned = [copy(pace) for pace in nearest.paces[1:]] if nearest else [Pace() for _ in widths[1:]]
        self.paces: list[Pace] = [Pace(PLAIN_MEMORY_STEPS), *learned]
        self.chosen: int = nearest.chosen if nearest else 0  # an index of `widths`, like all that follow
        self._credit_steps = 0 if nearest else FIRST_CREDIT_STEPS
        self._saved_s = 0.0
        self._wait_steps = 0
        self._steps_since_plain = 0
        self._turn = 0

    @property
    def plain_s(self) -> float:
        """Seconds of a step of width 1; 0 while that is not known."""
        return self.paces[0].step_s

    def next(self) -> int:
        """The chosen one; or in turn of the next wider and the next narrower, the one to be tried; or width 1, which
        cannot lose."""
        self._wait_steps -= 1
        self._steps_since_plain += 1
        if self.paces[0].num_steps < FIRST_STEPS or self._steps_since_plain >= self._plain_steps():
            return 0
        near = [i for i in (self.chosen + 1, self.chosen - 1) if 0 < i < len(self.widths)]
        tried = near[self._turn % len(near)] if near else self.chosen
        if self._wait_steps > 0 or self._saved_s < self._expected_loss_s(tried):
            return self.chosen
        self._turn += 1
        self._wait_steps = STEPS_BETWEEN_TRIALS
        return tried

    def _plain_steps(self) -> float:
        """Between steps of width 1: the less the chosen width gains, the less they cost and the more they matter."""
        share = 1 - 1 / max(1.0, self.paces[self.chosen].speedup)
        return max(PLAIN_STEPS / 8, min(PLAIN_STEPS, share / PLAIN_SHARE))

    def _expected_loss_s(self, tried: int) -> float:
        """Return the expected loss of a step against the chosen width. A width that was never measured is
        taken to bring as many tokens as the widest measured one. For each token of a request it takes longer by as
        much as the widest measured width takes longer than the one before."""
        seen = tried
        while not self.paces[seen].num_steps:
            seen -= 1
        pace, step_s = self.paces[seen], self.paces[seen].step_s
        if seen < tried:
            before, wider = (self.paces[seen - 1].step_s, self.widths[seen - 1]) if seen else (0.0, 0)
            slope = max(0.0, step_s - before) / (self.widths[seen] - wider)
            step_s += slope * (self.widths[tried] - self.widths[seen])
        loss_s = step_s - pace.step_s * pace.speedup / self.paces[self.chosen].speedup
        return min(loss_s, MOST_SAVED_STEPS * self.plain_s)

    def ended(self, index: int, tokens_each: float, seconds: float) -> None:
        """`tokens_each`: of a running request."""
        beginning = not index and self.paces[0].num_steps < FIRST_STEPS
        if beginning and OUTLIER * seconds < self.plain_s:  # those before were disturbed, by captures or cold caches
            self.paces[0] = Pace(PLAIN_MEMORY_STEPS)
        if self.plain_s:
            seconds = min(seconds, OUTLIER * self.plain_s * max(1.5, self.widths[index]))
            worth_s = tokens_each * self.plain_s if index else seconds
            tried = index not in (0, self.chosen)
            lost_s = max(0.0, seconds - worth_s / self.paces[self.chosen].speedup) if tried else 0.0
            self._saved_s = min(self._saved_s + EXPLORATION_SHARE * worth_s - lost_s, MOST_SAVED_STEPS * self.plain_s)
        elif index:
            return  # nothing to compare it with
        else:
            worth_s = seconds
        self.paces[index].ended(worth_s, seconds)
        self._steps_since_plain = self._steps_since_plain if index else 0
        if self.paces[0].num_steps == FIRST_STEPS:
            self._saved_s += self._credit_steps * self.plain_s
            self._credit_steps = 0
        self._choose()

    def _choose(self) -> None:
        best = self.chosen if self.paces[self.chosen].gain_s > 0 else 0
        for index, pace in enumerate(self.paces):
            known = pace.gain_s > 0 and pace.num_steps > FEW_STEPS
            if known and pace.speedup > SWITCH_GAIN * self.paces[best].speedup:
                best = index
        self.chosen = best


class Mark(NamedTuple):
    """Sums over all steps of decodes alone until some moment: how many, the tokens of a request in each, their time,
    what each would have taken at width 1, and what their tokens are worth. `num_mixed` are the steps that had prompts
    too, in which each decode has one token."""

    num_steps: int = 0
    num_mixed: int = 0
    tokens_each: float = 0.0
    seconds: float = 0.0
    plain_s: float = 0.0
    worth_s: float = 0.0


class Widths:
    """Which width the next step has, and what speculation gained until now.

    `options.adaptive`: the one that pays, of 1, 2, 4, ... and `num_draft_tokens`. Otherwise always the latter, except
    for a step of width 1 now and then, by which the gain is measured.
    """

    def __init__(self, options: SpeculationOptions) -> None:
        most = options.num_draft_tokens
        self._adaptive = options.adaptive
        self._widths = (*(1 << i for i in range((most - 1).bit_length())), most)
        self._buckets: dict[int, Bucket] = {}
        self._num_asked = 0
        self._recent = self._before = Mark()
        self.now = Mark()
        self.current = 1

    def width(self, num_running: int) -> int:
        """Return the width of the next decode step, of `num_requests` requests."""
        self._num_asked += 1
        if self._adaptive:
            self.current = self._widths[self._bucket(num_running).next()]
        else:
            self.current = 1 if self._num_asked % PLAIN_STEPS == 0 else self._widths[-1]
        return self.current

    def ended(self, num_running: int, width: int, tokens: int, seconds: float) -> None:
        """Record that a step of decodes alone took `seconds` and brought `tokens`; `width` is the requested one."""
        bucket, each, now = self._bucket(num_running), tokens / num_running, self.now
        plain_s = bucket.plain_s if width > 1 and bucket.plain_s else seconds
        self.now = now._replace(
            num_steps=now.num_steps + 1,
            tokens_each=now.tokens_each + each,
            seconds=now.seconds + seconds,
            plain_s=now.plain_s + plain_s,
            worth_s=now.worth_s + each * plain_s,
        )
        if self.now.num_steps - self._recent.num_steps >= RECENT_STEPS:
            self._before, self._recent = self._recent, self.now
        bucket.ended(self._widths.index(width), each, seconds)

    def mixed_ended(self) -> None:
        """A step with prompts, whose decodes had one token each."""
        self.now = self.now._replace(num_mixed=self.now.num_mixed + 1)

    def report(self, begin: Mark, num_tokens: int) -> SpeculationReport | None:
        """Return the report of a request that had `num_tokens` in the steps since `begin`; None if there was no step of
        decodes alone."""
        now = self.now
        steps, seconds = now.num_steps - begin.num_steps, now.seconds - begin.seconds
        tokens = num_tokens - (now.num_mixed - begin.num_mixed)
        if steps < 1 or tokens < 1 or seconds <= 0:
            return None
        each = tokens / steps
        # No step is sooner done for its guesses: where it seems so, the machine was busier when width 1 was measured.
        slower = min(1.0, (now.plain_s - begin.plain_s) / seconds)
        return SpeculationReport(accepted_per_step=each, net_speedup=each * slower)

    @property
    def recent(self) -> SpeculationReport:
        """Means of the last `RECENT_STEPS` of decodes alone, or up to twice as many."""
        now, begin = self.now, self._before
        steps, seconds = now.num_steps - begin.num_steps, now.seconds - begin.seconds
        if not seconds:
            return SpeculationReport(accepted_per_step=1.0, net_speedup=1.0)
        each, worth_s = now.tokens_each - begin.tokens_each, now.worth_s - begin.worth_s
        return SpeculationReport(accepted_per_step=each / steps, net_speedup=worth_s / seconds)

    def _bucket(self, num_running: int) -> Bucket:
        """One for each number below 8, then a few for each doubling."""
        shift = max(0, num_running.bit_length() - 3)
        key = num_running >> shift << shift
        bucket = self._buckets.get(key)
        if bucket is None:
            nearest = min(self._buckets, key=lambda other: abs(other - key), default=None)
            bucket = Bucket(self._widths, None if nearest is None else self._buckets[nearest])
            self._buckets[key] = bucket
        return bucket

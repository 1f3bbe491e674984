"""Judges the exercises on data parallelism."""

from collections import Counter
from collections.abc import Callable

from labkit.course.exercise import Verdict

NUM_SAMPLES, BATCH_SIZE = 1438, 64
WORLD_SIZES = (2, 3, 4, 8)

Deal = Callable[[int, int, int, int, int], list[list[int]]]


def each_exactly_once(deal: Deal) -> Verdict:
    """`deal(num_samples, batch_size, epoch, rank, world_size)` gives a rank's batches,
    as lists of samples: of all ranks together each sample once, in every epoch in
    another order, and on every rank as many batches, of at most `batch_size`."""
    worst = 0
    for world_size in WORLD_SIZES:
        on = f"on {world_size} ranks"
        orders = []
        for epoch in range(2):
            batches = [
                [[int(sample) for sample in batch] for batch in dealt]
                for dealt in (
                    deal(NUM_SAMPLES, BATCH_SIZE, epoch, rank, world_size)
                    for rank in range(world_size)
                )
            ]
            counts = [len(each) for each in batches]
            if len(set(counts)) > 1:
                return Verdict(
                    complaint=f"{on} some have {min(counts)} batches and some "
                    f"{max(counts)}: those with more wait in their last all-reduce"
                )
            largest = max(len(batch) for each in batches for batch in each)
            if largest > BATCH_SIZE:
                return Verdict(
                    complaint=f"{on} a batch has {largest} samples, not {BATCH_SIZE}"
                )
            seen = Counter(s for each in batches for batch in each for s in batch)
            if strange := sorted(set(seen) - set(range(NUM_SAMPLES))):
                return Verdict(complaint=f"{on} there is a sample {strange[0]}")
            extra = sum(count - 1 for count in seen.values())
            worst = max(worst, extra + NUM_SAMPLES - len(seen))
            orders.append(batches)
        if orders[0] == orders[1]:
            return Verdict(complaint=f"{on} both epochs have the same order")
        if [s for each in orders[0] for batch in each for s in batch] == sorted(seen):
            return Verdict(complaint=f"{on} nothing is shuffled")
    return Verdict(
        measured=f"at worst {worst} samples are seen twice or never",
        to_beat="0",
        is_beaten=worst == 0,
    )

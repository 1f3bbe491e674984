from labkit.course import check

check(
    "name_rank_and_cause",
    {"first": (1, "compute"), "second": (0, "asleep"), "third": (0, "data")},
)

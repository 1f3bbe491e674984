from labkit.course import check

check("best_in_a_minute", {"lr": 0.01, "width": 256})

from labkit.course import check

# As far ahead as it is allowed, and then no step before the slowest has taken one.
check("sooner_than_all_reduce", lambda own, others: own - min(others) <= 28)

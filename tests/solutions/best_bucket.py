from labkit.course import check

# Two layers of 1 MiB fill a bucket: (last, 6th, 5th), (4th, 3rd), (1st).
check("best_bucket", 2)

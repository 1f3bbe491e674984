from labkit.course import check

check("fewest_gpus", (2, "fsdp"), (16, "fsdp"))

from labkit.course import check


def best_every(checkpoint_s, between_failures_s):
    return (2 * checkpoint_s * between_failures_s) ** 0.5  # Young, 1974


check("best_every", best_every)

from labkit.course import check
from labkit.models import next_token_loss


def my_backward(model, x, y):
    for micro_x, micro_y in zip(x, y, strict=True):
        loss = next_token_loss(model(micro_x[None]), micro_y[None])
        (loss / len(x)).backward()


check("half_the_peak", my_backward)

"""What ranks on hosts train in these tests."""

from labkit import Run


def training_cell(
    *,
    num_features: int = 8,
    num_hidden: int = 16,
    num_samples: int = 96,
    epochs: int = 1,
    pause_s: float = 0,
) -> str:
    """Code of a cell, which takes a step for each 12 samples."""
    return f"""
import time
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear({num_features}, {num_hidden}),
    torch.nn.ReLU(),
    torch.nn.Linear({num_hidden}, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
dataset = torch.utils.data.TensorDataset(
    torch.randn({num_samples}, {num_features}), torch.randn({num_samples}, 1)
)
model, optimizer, loader = prepare(
    model, optimizer, dataset, batch_size=12, shuffle=False
)
for epoch in range({epochs}):
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep({pause_s})
"""


CELL = training_cell()


def mean_losses(run: Run) -> list[float]:
    """The mean over the ranks of each step."""
    return list(run.history.groupby("step")["loss"].mean())

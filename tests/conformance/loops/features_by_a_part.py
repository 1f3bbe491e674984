"""After each step a part of the model, then the whole, is run in inference mode."""

inputs = torch.randn(32, 6, generator=torch.Generator().manual_seed(2))
dataset = torch.utils.data.TensorDataset(inputs, inputs.sin())
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer, loader = prepare(
    model, optimizer, dataset, batch_size=8, shuffle=False
)
for x, y in loader:
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.inference_mode():
        features = model[0](inputs[:4].to(device))
        guessed = model(inputs[:4].to(device))
with torch.no_grad():
    result = model(inputs[:4].to(device))

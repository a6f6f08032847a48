"""Models that several tests use."""

import torch


class Small(torch.nn.Module):
    """Both kinds of layers between float ones. Input [...] indices below 50; output [..., 48]."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 48)
        self.norm = torch.nn.LayerNorm(48)
        self.up = torch.nn.Linear(48, 80)
        self.down = torch.nn.Linear(80, 48, bias=False)

    def forward(self, indices):
        x = self.norm(self.table(indices))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

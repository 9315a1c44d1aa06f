"""The two built-in models: a GPT over tokens and a small residual network over images.

Both are made on the CPU from the run's seed alone, so that initialisation does not depend on the number of ranks.
Neither has statistics over the batch (LayerNorm, GroupNorm) unless asked for: a sample's result does not depend on its
neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as all of torch's own documentation has it
from torch import Tensor, nn

from .configuration import ModelConfig


class GPTBlock(nn.Module):
    """Pre-norm attention and feed-forward: (batch, positions, width) → the same."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, width = x.shape
        query, key, value = (
            part.view(batch, positions, self.heads, width // self.heads).transpose(1, 2)
            for part in self.query_key_value(self.attention_norm(x)).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=dropout)
        x = x + self._drop(self.attention_out(mixed.transpose(1, 2).reshape(batch, positions, width)))
        return x + self._drop(self.feed_out(F.gelu(self.feed_in(self.feed_norm(x)))))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A decoder-only transformer (Radford et al. 2019): (batch, positions) int64 → (batch, positions, vocabulary)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width, layers = config.width, config.layers
        self.token_embedding = nn.Embedding(config.vocabulary, width)
        self.position_embedding = nn.Embedding(config.context, width)
        self.blocks = nn.ModuleList(GPTBlock(width, config.heads, config.dropout) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # residual branches start small, so that the variance does not grow with depth
                small = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if small else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


class Convolution(nn.Linear):
    """A square convolution without bias whose weight is a matrix, (channels, channels_in · size²).

    The gradient of a four-dimensional weight comes with other strides than the weight wherever a dimension is 1, and
    DDP must then copy it, with a warning; a matrix has one layout.
    """

    def __init__(self, channels_in: int, channels: int, size: int, stride: int = 1):
        super().__init__(channels_in * size * size, channels, bias=False)
        self.kernel, self.stride = (channels, channels_in, size, size), stride

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels_in, h, w) → (batch, channels, ⌈h/stride⌉, ⌈w/stride⌉)."""
        return F.conv2d(x, self.weight.view(self.kernel), stride=self.stride, padding=self.kernel[-1] // 2)


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(next(g for g in (8, 4, 2, 1) if channels % g == 0), channels)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions with a norm each and a shortcut (He et al. 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int, norm: str):
        super().__init__()
        self.first = Convolution(channels_in, channels, 3, stride)
        self.first_norm = _norm(norm, channels)
        self.second = Convolution(channels, channels, 3)
        self.second_norm = _norm(norm, channels)
        plain = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if plain else Convolution(channels_in, channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x)))))
        return F.relu(y + self.shortcut(x))


class ResidualNetwork(nn.Module):
    """A small image classifier: (batch, channels, h, w) → (batch, classes) logits."""

    def __init__(self, config: ModelConfig, channels: int, classes: int):
        super().__init__()
        before = config.width
        self.stem = Convolution(channels, before, 3)
        self.blocks = nn.ModuleList()
        for stage in range(config.stages):
            for block in range(config.blocks):
                after = config.width << stage
                self.blocks.append(ResidualBlock(before, after, 2 if stage and not block else 1, config.norm))
                before = after
        self.head = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

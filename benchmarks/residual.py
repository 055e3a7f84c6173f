"""ResNets of bottlenecks in plain torch, so that a GPU's benchmark needs no torchvision.

They follow He et al. 2015, with the stride in the 3x3 convolution, as in torchvision. ``sizes`` (3, 4, 6, 3) is
ResNet-50.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

RESNET50 = (3, 4, 6, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """A bottleneck: 1x1, 3x3, 1x1 convolutions and the shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        wide = EXPANSION * width
        self.through = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels != wide:
            self.around = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, channels, side, side]`` to ``[n, 4 * width, side / stride, side / stride]``."""
        return nn.functional.relu(self.through(x) + self.around(x))


def resnet(sizes: Sequence[int] = RESNET50, width: int = 64, classes: int = 10) -> nn.Sequential:
    """Return a ResNet for pictures of three channels."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = width
    for group, count in enumerate(sizes):
        for place in range(count):
            layers.append(Bottleneck(channels, width << group, 2 if group and not place else 1))
            channels = EXPANSION * (width << group)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))

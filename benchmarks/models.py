"""The models and machines that benchmarks speak of: one table each. Imports nothing but the standard library.

Notation: H hidden, F width of an expert, E experts, K experts per token, R ranks, S tokens per rank.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model's MoE layers, as its published configuration gives them; an expert is a SwiGLU, three H x F."""

    name: str
    H: int
    F: int
    E: int
    K: int

    @property
    def expert_params(self) -> int:
        """Parameters of one expert."""
        return 3 * self.H * self.F

    @property
    def row_flops(self) -> int:
        """Floating-point operations of one row's forward pass through one expert."""
        return 2 * self.expert_params

    def weights(self, dtype: object) -> dict[str, tuple[tuple[int, int], object]]:
        """One expert's leaves, as EPConfig.weights wants them."""
        return {"gate": ((self.H, self.F), dtype), "up": ((self.H, self.F), dtype), "down": ((self.F, self.H), dtype)}

    def experts_on(self, R: int) -> int | None:
        """E, or the next multiple of R (idle experts fill up the last ranks); None if there are fewer experts than R.

        Such models do run on 72 ranks, with idle or duplicated experts.
        """
        return -(-self.E // R) * R if self.E >= R else None

    def __str__(self) -> str:
        return self.name


MODELS: tuple[Model, ...] = (
    Model("Mixtral-8x7B", 4096, 14336, 8, 2),
    Model("gpt-oss-120b", 2880, 2880, 128, 4),
    Model("Qwen3-235B", 4096, 1536, 128, 8),
    Model("DeepSeek-V3", 7168, 2048, 256, 8),
    Model("Kimi-K2", 7168, 2048, 384, 8),
    Model("Kimi-K3", 3584, 3072, 896, 16),  # experts work on a latent of 3584
)
BY_NAME: dict[str, Model] = {m.name: m for m in MODELS}


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU and its link, for predictions.

    Attributes:
      name: of the GPU.
      peak_flops: dense bf16 FLOP/s of the data sheet.
      peak_link: NVLink bytes/s each way of the data sheet.
      flops: FLOP/s that a large bf16 matmul attains.
      link: bytes/s each way that a rank attains while it sends and receives.
      source: where the attained figures are from.
    """

    name: str
    peak_flops: float
    peak_link: float
    flops: float
    link: float
    source: str

    @property
    def break_even(self) -> float:
        """Rows above which moving them is worth sending their bf16 expert, forward.

        A row saves 2 * 3HF FLOP, an expert is 2 * 3HF bytes: H and F cancel out.
        """
        return self.flops / self.link


MACHINES: tuple[Machine, ...] = (
    Machine(
        "H200",
        989e12,
        450e9,
        629e12,
        351e9,
        "measured: dense bf16 matmul of 32768 x 7168 x 2048; SM pushes between two GPUs, both ways at once",
    ),
    Machine(
        "GB200",
        2500e12,
        900e9,
        1590e12,
        776e9,
        "link: MoonEP PR 23, 24 slots on 32 SMs; FLOP/s: the share of the peak that H200 attains, not measured",
    ),
)

"""Softmax attention of Transformer++: rotary positions, causal, optionally of the last `window` tokens only. The baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention

from proteus_lm.mixers.base import Mixer, ResidualLinear
from proteus_lm.mixers.norm import wide
from proteus_lm.mixers.rotary import check_rotary, rotate, turn_at
from proteus_lm.ops.triton_neighbours import runs, turned_parts
from proteus_lm.schedule import ActivationSchedule
from proteus_lm.sequence import TokenSequence

if TYPE_CHECKING:
    from proteus_lm.config import ProteusConfig


class AttentionState(NamedTuple):
    """Keys (turned to their positions) and values of the tokens so far, the newest last.

    Args:
        keys, values: (N, M, H, D). A row with fewer than M tokens behind it has them in its last places; M is `window` with a
            window, and what the longest row needs without.
    """

    keys: Tensor
    values: Tensor


class Prefix(NamedTuple):
    """Learned places that every query sees whatever its position (spec/deep.md 1.5).

    They have no position: queries meet them as they are before they are turned, so nothing about them changes with the distance.

    Args:
        keys, values: (n, H, D), not turned.
    """

    keys: Tensor
    values: Tensor


def softmax_read(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, prefix: Prefix | None = None) -> Tensor:
    """Softmax attention of turned queries.

    Args:
        q: (N, L, H, D); with a prefix (N, L, H, 2 D), behind each turned query the query before it was turned.
        k, v: (N, M, H, D).
        mask: bool (N or 1, 1, L, M), the keys each query sees; with a prefix (N or 1, 1, L, n + M), its places first. None, without
            a prefix: those up to the query's own place, L = M.

    Returns:
        (N, L, H, D).
    """
    scale = k.shape[-1] ** -0.5
    if prefix is not None:
        assert mask is not None, "a prefix needs a mask"
        width = k.shape[-1]  # the first half of a query meets the turned keys, the second the prefix
        front = pad(prefix.keys.to(k.dtype), (width, 0)).expand(len(k), -1, -1, -1)
        k = torch.cat((front, pad(k, (0, width))), 1)
        v = torch.cat((prefix.values.to(v.dtype).expand(len(v), -1, -1, -1), v), 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale).transpose(1, 2)


def window_read(q: Tensor, k: Tensor, v: Tensor, prefix: Prefix | None = None) -> Tensor:
    """`softmax_read` of the last `window` keys, each query's own among them, where every query has that many: in blocks of
    `window` queries, which see their own block of keys and the one before. A mask of all pairs would grow with the length squared.

    Args:
        q: (N, L, H, D or, with a prefix, 2 D).
        k, v: (N, window + L, H, D), `window` places before the first query's on.
    """
    length, window = q.shape[1], k.shape[1] - q.shape[1]
    blocks = -(-length // window)
    fill = blocks * window - length  # behind the last query, which sees none of it
    q, k, v = (pad(x, (0, 0, 0, 0, 0, fill)).unflatten(1, (-1, window)) for x in (q, k, v))
    k, v = (torch.cat((x[:, :-1], x[:, 1:]), 2).flatten(0, 1) for x in (k, v))
    query, key = torch.arange(window, device=q.device)[:, None], torch.arange(2 * window, device=q.device)
    mask = (key > query) & (key <= query + window)
    front = 0 if prefix is None else len(prefix.keys)
    y = softmax_read(q.flatten(0, 1), k, v, pad(mask, (front, 0), value=True)[None, None], prefix)
    return y.unflatten(0, (-1, blocks)).flatten(1, 2)[:, :length]


class AttentionMixer(Mixer):
    """Multi-head attention: y_t = out(sum_j softmax_j(q_t k_j / sqrt D) v_j), j <= t, and t - j < window where there is one."""

    fields = frozenset({"window"})

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__()
        self.heads, self.dim, self.window = config.num_heads, config.head_dim, config.window
        width = self.heads * self.dim
        self.linear = nn.Linear(config.hidden_size, 3 * width, bias=False)
        self.out = ResidualLinear(width, config.hidden_size, bias=False)

    @classmethod
    def validate(cls, config: ProteusConfig) -> None:
        """Rotary embedding turns pairs of coordinates."""
        check_rotary(config.head_dim)

    @classmethod
    def memory_dim(cls, config: ProteusConfig) -> None:
        """No memory to schedule."""

    @classmethod
    def parameter_count(cls, config: ProteusConfig) -> int:
        """Maps of q, k, v and the output."""
        return 4 * config.hidden_size * config.num_heads * config.head_dim

    @classmethod
    def flops_per_token(cls, config: ProteusConfig, length: int) -> float:
        """Maps, and scores and sums over the tokens a query may see (half of them on average, without a window)."""
        window = min(length, config.window or length)
        visible = (window * (window + 1) / 2 + (length - window) * window) / length
        return 2 * cls.parameter_count(config) + 4 * config.num_heads * config.head_dim * visible

    @classmethod
    def state_size(cls, config: ProteusConfig, length: int) -> int:
        """Keys and values of every token, or of `window` tokens."""
        return 2 * (config.window or length) * config.num_heads * config.head_dim

    def init_state(self, batch: int, device: torch.device | str, dtype: torch.dtype) -> AttentionState:
        """No tokens, or `window` empty places."""
        empty = torch.zeros(batch, self.window or 0, self.heads, self.dim, device=device, dtype=dtype)
        return AttentionState(empty, empty)

    @property
    def growing(self) -> frozenset[str]:
        """Keys and values, without a window."""
        return frozenset() if self.window else frozenset(AttentionState._fields)

    def memory_norm(self, state: AttentionState, schedule: ActivationSchedule) -> Tensor:
        """Zeros: what attention keeps is no memory of fixed size."""
        return wide(state.keys.new_zeros(len(state.keys), schedule.blocks))

    def put_rows(self, state: AttentionState, rows: Tensor, part: AttentionState) -> AttentionState:
        """As `Mixer.put_rows`; the shorter side is widened in front."""
        length = max(state.keys.shape[1], part.keys.shape[1])
        state, part = (AttentionState(*(_last(x, length) for x in side)) for side in (state, part))
        return super().put_rows(state, rows, part)

    def forward(
        self, x: Tensor, sequence: TokenSequence, state: AttentionState | None = None, use_state: bool = False
    ) -> tuple[Tensor, AttentionState | None]:
        """As `Mixer.forward`."""
        y, state = self.attend(x, sequence, state, use_state)
        return self.out(y), state

    def project(self, x: Tensor, sequence: TokenSequence) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (B, T, hidden) -> queries before they are turned, queries, keys, values, each (B, T, H, D)."""
        parts = self.linear(x).unflatten(-1, (3, self.heads, self.dim))
        turn = turn_at(sequence, parts)
        if runs(parts, *turn):
            q, k, v, plain = turned_parts(parts, *turn, False)
            return plain, q, k, v
        plain, k, v = parts.unbind(2)
        return plain, rotate(plain, turn), rotate(k, turn), v

    @property
    def keys_values_map(self) -> Tensor:
        """Weight (2 H D, hidden) of the map to keys and values."""
        return self.linear.weight[self.heads * self.dim :]

    def keys_values(self, x: Tensor, weight: Tensor | None = None) -> Prefix:
        """Keys and values (..., H, D) of x (..., hidden), not turned to a position; `weight`: `keys_values_map`, made before."""
        weight = self.keys_values_map if weight is None else weight
        k, v = linear(x.to(weight.dtype), weight).unflatten(-1, (2, self.heads, self.dim)).unbind(-3)
        return Prefix(k, v)

    def attend(
        self,
        x: Tensor,
        sequence: TokenSequence,
        state: AttentionState | None = None,
        use_state: bool = False,
        persistent: Tensor | None = None,
    ) -> tuple[Tensor, AttentionState | None]:
        """As `Mixer.forward`, before the output map: (B, T, H D). `persistent` (n, hidden) is seen by every token.

        Packed documents are attended as rows padded on the right, which a causal mask never sees.
        """
        tokens = plain, q, k, v = self.project(x, sequence)
        packed = sequence.cu_seqlens is not None
        if packed:
            plain, q, k, v = (sequence.documents.split(part) for part in tokens)
        if state is not None:
            k, v = (torch.cat((old.to(new.dtype), new), 1) for old, new in zip(state, (k, v)))
        past, length = k.shape[1] - q.shape[1], q.shape[1]
        front = 0 if persistent is None else len(persistent)
        cut = length if self.window is None or length <= 2 * self.window else self.window
        mask = sequence.once(("visible", self.window, front), lambda: self._visible(past, cut, sequence, front))
        prefix = None
        if persistent is not None:
            prefix, q = self.keys_values(persistent), torch.cat((q, plain), -1)
        y = softmax_read(q[:, :cut], k[:, : past + cut], v[:, : past + cut], mask, prefix)
        if cut < length:
            y = torch.cat((y, window_read(q[:, cut:], k[:, past:], v[:, past:], prefix)), 1)
        if packed:
            y = sequence.documents.join(y)
        return y.flatten(-2), self._state(k, v, length, sequence) if use_state else None

    def _visible(self, past: int, length: int, sequence: TokenSequence, front: int) -> Tensor | None:
        """Which places each query sees, bool (N or 1, 1, length, front + past + length), all of the front; None: the plain rule."""
        if not front and not past and (self.window is None or self.window >= length):
            return None
        key = torch.arange(past + length, device=sequence.device)
        query = past + torch.arange(length, device=sequence.device)[:, None]
        mask = key <= query
        if self.window is not None:
            mask = mask & (key > query - self.window)
        mask = mask[None]
        if past:
            assert sequence.offset is not None, "a state stands at a position"
            mask = mask & (key >= past - sequence.offset[:, None, None])
        return pad(mask, (front, 0), value=True)[:, None]

    def _state(self, k: Tensor, v: Tensor, length: int, sequence: TokenSequence) -> AttentionState:
        """Keep the last tokens of every row, each in the last places."""
        past = k.shape[1] - length
        if sequence.cu_seqlens is None:
            width = self.window or k.shape[1]
            return AttentionState(_last(k, width), _last(v, width))
        lengths = sequence.documents.lengths
        behind = lengths if sequence.offset is None else lengths + sequence.offset
        width = self.window or int(behind.max())
        slots = torch.arange(width, device=k.device)
        places = ((past + lengths)[:, None] - width + slots).clamp(min=0)
        filled = (slots >= width - behind[:, None])[..., None, None]
        rows = torch.arange(len(k), device=k.device)[:, None]
        return AttentionState(*(torch.where(filled, x[rows, places], x.new_zeros(())) for x in (k, v)))


def _last(x: Tensor, width: int) -> Tensor:
    """The last `width` places of x (N, M, H, D), zeros in front where there are fewer."""
    return x[:, -width:] if x.shape[1] >= width else pad(x, (0, 0, 0, 0, width - x.shape[1], 0))

"""One backbone for every mixer: embedding, n x (norm, mixer; norm, SwiGLU MLP), norm, head. A transformers model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from proteus_lm.cache import ProteusCache
from proteus_lm.config import ProteusConfig
from proteus_lm.hope import Chain
from proteus_lm.mixers.base import Mixer, ResidualLinear
from proteus_lm.mixers.norm import RMSNorm, wide
from proteus_lm.mixers.state import map_state
from proteus_lm.mlp import MLP
from proteus_lm.ops.cross_entropy import IGNORED, linear_cross_entropy
from proteus_lm.ops.rows import check_floating, check_packed
from proteus_lm.sequence import TokenSequence, Unpadding
from proteus_lm.wave import run_wave

INIT_STD = 0.02
# transformers 5.2x renames `past_key_values` to `cache`; both names are taken, and the one it knows is given back.
CACHE_NAME = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"

REMEDIES = {
    "position_ids": "positions count from the start of each document; give cu_seqlens where several are packed in one row",
    "output_attentions": "they have no attention weights to give; leave it out",
}


class More(TypedDict, total=False):
    """What a forward takes beside the arguments in its signature."""

    shift_labels: Tensor | None


class Block(GradientCheckpointingLayer):
    """One layer: x + mixer(norm(x)), then x + MLP(norm(x)), or Hope's chain of such."""

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer: Mixer = config.mixer_class(config)
        self.chain = Chain(config) if config.channel == "chain" else None
        if self.chain is None:
            self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, sequence: TokenSequence, state: Any = None, use_state: bool = False) -> tuple[Tensor, Any]:
        """As `Mixer.forward`."""
        mixed, state = self.mixer(self.mixer_norm(x), sequence, state, use_state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)) if self.chain is None else self.chain(x), state


class ProteusForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model as `ProteusConfig` describes it; `proteus_lm` registers it with transformers' Auto classes."""

    config_class = ProteusConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}  # noqa: RUF012 - transformers' own convention
    _no_split_modules = ["Block"]  # noqa: RUF012
    _is_stateful = True
    _supports_sdpa = True
    accepts_loss_kwargs = True
    """transformers' Trainer hands `num_items_in_batch` on to models that say so."""

    def __init__(self, config: ProteusConfig) -> None:
        super().__init__(config)
        config.check()
        self.schedule = config.schedule
        self.wave = 0
        """Pieces that a training forward of whole rows is cut into, so that its layers overlap on a GPU (`wave`); 0: none."""
        with torch.random.fork_rng(devices=[]):  # torch's own first values shall not count: one seed, one model, however it is made
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
            self.norm = RMSNorm(config.hidden_size, config.norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Rounded to 8 bits they would be wrong: a model loaded in bf16 or fp16 keeps them in fp32.
        self._keep_in_fp32_modules_strict = list(self._small_parameters())
        self.post_init()
        self.mark_no_decay()

    # Parameters.

    def mark_no_decay(self) -> None:
        """Set `_no_weight_decay` on gates, norms, biases, embeddings and learned initial memories, as their modules declare.

        Anything that replaces parameters (`to_empty`, sharding) drops the marks: call this again.
        """
        for parameter in (*self._small_parameters().values(), self.embed_tokens.weight):
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    def _small_parameters(self) -> dict[str, nn.Parameter]:
        """Gates, norms, biases and initial memories by name, as their modules declare in `no_decay`."""
        names = [f"{path}.{name}" for path, module in self.named_modules() for name in getattr(module, "no_decay", ())]
        parameters = dict(self.named_parameters())
        return {name: parameters[name] for name in names if name in parameters}

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As transformers; the marks of `mark_no_decay` are set on the parameters it puts in place."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.mark_no_decay()
        return loaded

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its initial value from the global random state, as the constructor does.

        For a model made on the meta device: `to_empty(device=...)`, a seed, then this.
        """
        self.apply(self._init_weights)
        self.tie_weights()
        self.mark_no_decay()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            residual = isinstance(module, ResidualLinear)
            branches = self.config.num_hidden_layers * (1 + self.config.channels)
            nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(branches) if residual else INIT_STD)
            bias = getattr(module, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)
        own = getattr(module, "init_weights", None)
        if own is not None and module is not self:
            own()

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.layers))

    @staticmethod
    def parameter_count(config: ProteusConfig) -> int:
        """Parameters of a model of this configuration, without making it."""
        hidden = config.hidden_size
        layer = config.mixer_class.parameter_count(config) + MLP.parameter_count(hidden, config.intermediate_size)
        layer += (1 + config.channels) * hidden  # norms
        tables = 1 if config.tie_word_embeddings else 2
        return config.num_hidden_layers * layer + tables * config.vocab_size * hidden + hidden

    @staticmethod
    def flops_per_token(config: ProteusConfig, length: int) -> float:
        """Floating-point operations of a forward, a token, mean over a document of `length` tokens.

        A multiplication with its addition counts two; norms and elementwise functions are left out. Training takes about three
        times as many.
        """
        layer = config.mixer_class.flops_per_token(config, length) + MLP.flops(config.hidden_size, config.intermediate_size)
        return config.num_hidden_layers * layer + 2 * config.hidden_size * config.vocab_size

    # Memory.

    def set_context(self, length: int | None) -> None:
        """Open the blocks of memory evenly over `length` tokens instead of the training context; None: over that one again.

        Of `memory_policy` "stretch" (docs/policies.md). It holds for this model in this process: files keep the training context.
        A cache filled before is refused after.

        Raises:
            ValueError: for another policy, whose blocks open where they did in training, or a length below 1.
        """
        policy, schedule = self.config.memory_policy, self.config.schedule
        if policy != "stretch":
            raise ValueError(
                f"set_context({length}) with memory_policy {policy!r}, whose blocks open where they did in training; load the "
                "model with memory_policy='stretch' to spread them over another length"
            )
        self.schedule = schedule if length is None else schedule.stretched(length)

    @torch.no_grad()
    def fingerprint(self) -> str:
        """SHA-256, in hexadecimal, of what a state depends on: configuration, and every parameter's name, type and bits.

        Reads all weights; saved memories are bound to it. The schedule, which may be stretched, is compared by itself.
        """
        digest = hashlib.sha256(json.dumps(self.config.shape(), sort_keys=True).encode())
        for name, parameter in self.named_parameters():
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def memory_norms(self, cache: ProteusCache) -> Tensor:
        """Frobenius norm by block of what each layer's memory holds beyond its initial value: (layers, N, E); zeros without memory.

        Raises:
            ValueError: for a cache that no forward has filled.
        """
        if cache.states is None:
            raise ValueError("the cache is empty; run the model with use_cache=True first")
        return torch.stack([block.mixer.memory_norm(s, self.schedule) for block, s in zip(self._blocks, cache.states)])

    def surprises(self, cache: ProteusCache) -> Tensor:
        """Mean norm of the inner gradients of each layer's memory at the last few tokens: (layers, N); zeros where there are none.

        Raises:
            ValueError: for a cache that no forward has filled.
        """
        if cache.states is None:
            raise ValueError("the cache is empty; run the model with use_cache=True first")
        found = [block.mixer.surprise(state) for block, state in zip(self._blocks, cache.states)]
        none = torch.zeros(1 if cache.position is None else len(cache.position), device=self.device)
        return torch.stack([none if norm is None else norm for norm in found])

    def initial_states(self, batch: int) -> list[Any]:
        """Every layer's state before the first token, of `batch` rows."""
        return [block.mixer.init_state(batch, self.device, self.dtype) for block in self._blocks]

    # Forward.

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: ProteusCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: ProteusCache | None = None,
        num_items_in_batch: int | Tensor | None = None,
        skip_logits: bool = False,
        **more: Unpack[More],
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the mean loss over the labels.

        Args:
            input_ids: int64 (B, T), or `inputs_embeds` (B, T, hidden) in their place.
            attention_mask: (B, T), or (B, past + T) with a cache, of which the last T columns count: 0 for tokens that are not
                there, anywhere in a row. They are taken out before the layers: not read, written, decayed or counted. Their
                logits are those of a zero vector.
            past_key_values: the cache of the tokens before these, updated; its newer name `cache` is taken too.
            use_cache: return a cache; None is: where one was given, else as the configuration says outside training.
            labels: integers (B, T), usually input_ids: a token's logits are scored on the next token of its document. -100, masked
                tokens and the first token of a document are not scored. The loss is 0 where nothing is.
            cu_seqlens: int (N + 1,), boundaries of documents packed in one row (B = 1); position and memory start anew at each. A
                cache returned with it has one row a document.
            logits_to_keep: logits of the last so many columns only, 0 for all; or a tensor (n,), the indices of the columns.
            output_hidden_states: also give the embeddings and each layer's output, (B, T, hidden) each.
            return_dict: False for a plain tuple.
            more: `shift_labels`, integers (B, T) in place of `labels`: what each token is scored on, as it stands (-100: not).
                Masked tokens are not scored. This and the next two have the names that transformers and Liger gave them; it has no
                place in the signature because transformers' Trainer takes whatever is called a label there for one that it must
                be given.
            num_items_in_batch: divide the summed loss by this, tokens of all micro-batches, not by those scored here.
            skip_logits: with labels, the loss by pieces of tokens, which never holds all logits (`ops.cross_entropy`), and None
                for the logits. First derivatives only. `lm_head` is not called: its weight is read.

        Raises:
            TypeError: for an argument that these models do not take.
            ValueError: for inputs that do not fit together. On the CPU also for ids and labels outside the vocabulary and masks of
                other values than 0 and 1; on a GPU, which would have to be waited for, ids and labels stop its own kernels
                (labels with `skip_logits` make the loss NaN).
        """
        shift_labels = more.pop("shift_labels", None)
        _check_names(more)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        if past_key_values is not None and cache is not None:
            raise ValueError("past_key_values and cache are two names of one argument; give one of them")
        past = past_key_values if past_key_values is not None else cache
        if use_cache is None:
            use_cache = past is not None or (self.config.use_cache and not self.training)
        given = labels if shift_labels is None else shift_labels
        name = "labels" if shift_labels is None else "shift_labels"
        self._check(tokens, attention_mask, past, given, cu_seqlens, logits_to_keep, name)
        self._check_loss(labels, shift_labels, num_items_in_batch, skip_logits)
        mask = None if attention_mask is None else attention_mask[:, -tokens.shape[1] :].bool()
        unpadding = None if mask is None else Unpadding(mask)
        self._check_ids(input_ids, given, unpadding, name)

        x = tokens if unpadding is None else unpadding.take(tokens)
        x = self.embed_tokens(x) if inputs_embeds is None else x
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden, states, position = self._run(x, past, bool(use_cache), cu_seqlens, unpadding, bool(output_hidden_states))
        logits = loss = None
        if not skip_logits:
            last = hidden[-1] if unpadding is None else unpadding.put(hidden[-1])
            logits = self.lm_head(last[:, logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)])
        if given is not None:
            targets = _targets(given, cu_seqlens, unpadding, shifted=shift_labels is not None)
            if logits is None:
                loss = linear_cross_entropy(hidden[-1], self.lm_head.weight, targets)
            else:
                loss = _loss(logits, targets if unpadding is None else unpadding.put(targets, IGNORED))
            count = (targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = (loss / count).to(loss.dtype)  # which a count in fp64 would widen
        if use_cache:
            past = ProteusCache() if past is None else past
            past.states, past.position, past.seen = states, position, past.seen + tokens.shape[1]
            past.schedule = self.schedule
        outputs: dict[str, Any] = {"loss": loss, "logits": logits, CACHE_NAME: past if use_cache else None}
        if output_hidden_states:
            outputs["hidden_states"] = tuple(h if unpadding is None else unpadding.put(h) for h in hidden)
        out = CausalLMOutputWithPast(**outputs)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return out if as_dict else out.to_tuple()

    def _check(
        self,
        tokens: Tensor,
        mask: Tensor | None,
        past: ProteusCache | None,
        labels: Tensor | None,
        cu_seqlens: Tensor | None,
        logits_to_keep: int | Tensor,
        name: str,
    ) -> None:
        """Raise ValueError for inputs that do not fit together; `labels` were given under `name`."""
        check_floating("the model", self.embed_tokens.weight.dtype)
        batch, length = tokens.shape[:2]
        if not length or not batch:
            raise ValueError(
                f"the input has shape {tuple(tokens.shape)}: no tokens; give at least one a row (a prompt may not be empty)"
            )
        seen = 0
        if past is not None:
            if not isinstance(past, ProteusCache):
                raise ValueError(
                    f"the cache is a {type(past).__name__}; these models take a proteus_lm.ProteusCache, or None at the start"
                )
            seen = past.seen
            past.check_schedule(self.schedule)
            if not past.is_empty and past.batch_size != batch:
                raise ValueError(
                    f"the cache has {past.batch_size} rows and the input {batch}; repeat the cache's rows "
                    "(batch_repeat_interleave) or choose among them (reorder)"
                )
        if mask is not None and (mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in (length, seen + length)):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; it must be ({batch}, {length}) for the new tokens"
                + (f", or ({batch}, {seen + length}) for past and new" if seen else "")
            )
        if mask is not None and _may_look(mask) and mask.dtype != torch.bool:
            other = mask[:, -length:][(mask[:, -length:] != 0) & (mask[:, -length:] != 1)]
            if len(other):
                raise ValueError(
                    f"attention_mask holds {other[0].item()}; give 1 for a token that counts and 0 for one that does not"
                )
        if labels is not None and labels.shape != tokens.shape[:2]:
            raise ValueError(f"{name} have shape {tuple(labels.shape)}; they must have that of the tokens, ({batch}, {length})")
        if labels is not None and (labels.is_floating_point() or labels.is_complex()):
            raise ValueError(f"{name} are {labels.dtype}; give integers, one a token")
        if isinstance(logits_to_keep, Tensor):
            if logits_to_keep.dim() != 1 or logits_to_keep.is_floating_point():
                raise ValueError(
                    f"logits_to_keep is a tensor {tuple(logits_to_keep.shape)} of {logits_to_keep.dtype}; give a number of "
                    "columns, or a tensor (n,) of integers, their indices"
                )
        elif logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}; give the number of last columns, or 0 for all")
        if labels is not None and (isinstance(logits_to_keep, Tensor) or logits_to_keep):
            raise ValueError(f"logits_to_keep is {logits_to_keep} with {name}: a loss needs all logits; leave it at 0")
        if cu_seqlens is not None:
            if not isinstance(cu_seqlens, Tensor):
                raise ValueError(
                    f"cu_seqlens is a {type(cu_seqlens).__name__}; give a tensor of integers, the documents' boundaries"
                )
            check_packed(batch, cu_seqlens)
            if mask is not None:
                raise ValueError("attention_mask and cu_seqlens together; pack the tokens that count and give cu_seqlens alone")
            if seen:
                raise ValueError("cu_seqlens with a cache that holds tokens: packed documents start anew; give one of them")
            if self.config.positions == "window":
                raise ValueError(
                    "cu_seqlens with positions 'window', where position and memory run through the whole window; leave "
                    "cu_seqlens out, or use positions 'document'"
                )

    def _check_loss(
        self, labels: Tensor | None, shift_labels: Tensor | None, num_items: int | Tensor | None, skip_logits: bool
    ) -> None:
        """Raise ValueError for arguments of the loss that do not fit together."""
        if labels is not None and shift_labels is not None:
            raise ValueError(
                "labels and shift_labels together; give one: shift_labels are scored as they stand, labels one token on"
            )
        if labels is None and shift_labels is None and (skip_logits or num_items is not None):
            raise ValueError("skip_logits and num_items_in_batch are for a loss; give labels (or shift_labels) with them")
        if isinstance(num_items, Tensor):
            if num_items.dim() or (_may_look(num_items) and num_items.item() <= 0):
                raise ValueError(f"num_items_in_batch is a tensor {num_items}; give one number above 0, of no dimension")
        elif num_items is not None and not (isinstance(num_items, int | float) and num_items > 0):
            raise ValueError(f"num_items_in_batch is {num_items!r}; give the number of scored tokens, above 0, or leave it out")
        head = self.lm_head
        if skip_logits and (type(head) is not nn.Linear or head.bias is not None):
            raise ValueError(
                f"skip_logits reads the weight of a plain linear head without bias, and lm_head is {head}; leave it out"
            )
        if skip_logits and (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)):
            raise ValueError(
                "skip_logits reads lm_head's weight and does not call it, and lm_head has hooks or another forward of its own "
                "(offload, pruning, a patch), which would not be heard; leave skip_logits out"
            )

    def _check_ids(self, ids: Tensor | None, labels: Tensor | None, unpadding: Unpadding | None, called: str) -> None:
        """Raise ValueError for ids or labels (`called` so) outside the vocabulary, masked ones aside, where the host can look."""
        size = self.config.vocab_size
        for name, given, rule in (("input_ids", ids, ""), (called, labels, f", or {IGNORED} for a token that is not scored")):
            if given is None or not _may_look(given):
                continue
            values = given if unpadding is None else unpadding.take(given)
            bad = (values < 0) | (values >= size)
            bad = bad & (values != IGNORED) if given is labels else bad
            if bad.any():
                raise ValueError(
                    f"{name} holds {values[bad][0].item()}, outside the model's vocabulary of {size}; give ids from 0 to {size - 1}"
                    f"{rule} (of the tokenizer that the model was trained with)"
                )

    def _run(
        self,
        x: Tensor,
        past: ProteusCache | None,
        use_cache: bool,
        cu_seqlens: Tensor | None,
        unpadding: Unpadding | None,
        keep_hidden: bool,
    ) -> tuple[list[Tensor], list[Any], Tensor]:
        """The layers and the last norm on tokens that all count.

        Returns:
            The last layer's output, normed, and before it with `keep_hidden` the embeddings and the other layers' outputs; states
            and position of every row after these tokens.
        """
        plain = past is None and cu_seqlens is None and unpadding is None
        if self.wave > 1 and self.training and plain and not (use_cache or keep_hidden):
            x = run_wave(self._blocks, x, self.schedule, self.wave)
            return [self.norm(x)], [], torch.full((len(x),), x.shape[1], device=x.device)
        given, position = (past.states, past.position) if past is not None else (None, None)
        lengths: Tensor | int = x.shape[1] if cu_seqlens is None else cu_seqlens.diff().long()
        rows = batch = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
        kept = None
        if unpadding is not None:
            rows, batch, kept = unpadding.count, unpadding.shape[0], unpadding.rows
            cu_seqlens, lengths = unpadding.cu_seqlens, unpadding.lengths
        offset = position if kept is None or position is None else position[kept]
        sequence = TokenSequence(self.schedule, rows, x.shape[1], offset=offset, cu_seqlens=cu_seqlens, device=x.device)
        if cu_seqlens is not None and not torch.compiler.is_compiling():
            _ = sequence.documents  # raises for boundaries that do not fit
        hidden: list[Tensor] = []
        states: list[Any] = []
        for i, block in enumerate(self._blocks):
            if keep_hidden:
                hidden.append(x)
            state = None if given is None else given[i]
            if kept is None:
                x, state = block(x, sequence, state, use_cache)
            else:
                x, state = _run_rows(block, x, sequence, state, use_cache, kept, batch)
            states.append(map_state(_own, state) if use_cache else None)
        hidden.append(self.norm(x))
        if position is None:
            position = torch.zeros(batch, dtype=torch.int64, device=x.device)
        return hidden, states, position + lengths

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` starts with a token in every row and an empty ProteusCache, whatever arguments its release hands on here.

        Raises:
            ValueError: for a prompt of masked tokens alone, or another kind of cache.
        """
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not mask.bool().any(1).all():
            raise ValueError(
                "attention_mask is 0 in a whole row: a prompt with no tokens; give each at least one token to go on from (where no "
                "mask was given, it leaves out every pad_token_id)"
            )
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation is {generation_config.cache_implementation!r}; these models have one kind of cache: "
                "leave it out"
            )
        given = model_kwargs.get(CACHE_NAME)
        if given is not None:
            given._is_user_defined = True  # it outlives the call
        elif generation_config.use_cache is not False:
            model_kwargs[CACHE_NAME] = ProteusCache()


def _may_look(x: Tensor) -> bool:
    """Whether the host may read values of x: on a GPU it would wait for them, and a compiled graph would break."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _own(x: Tensor) -> Tensor:
    """A state's tensor: a copy where it is a small part of what it was cut from, which it would keep alive."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return x
    return x.clone() if x.untyped_storage().nbytes() > 2 * x.numel() * x.element_size() else x


def _check_names(given: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that these models do not take; transformers hands on switches that are off."""
    for name, value in given.items():
        if value is not None and value is not False:
            raise TypeError(f"these models take no {name}: {REMEDIES.get(name, 'leave it out')}")


def _run_rows(
    block: Block, x: Tensor, sequence: TokenSequence, state: Any, use_cache: bool, kept: Tensor, batch: int
) -> tuple[Tensor, Any]:
    """A layer on the rows `kept` of a batch; the other rows, which have no token, keep their state."""
    part = None if state is None else map_state(lambda s: s.index_select(0, kept), state)
    if len(kept):
        x, part = block(x, sequence, part, use_cache)
    if not use_cache:
        return x, None
    if state is None:
        state = block.mixer.init_state(batch, x.device, x.dtype)
    return x, state if part is None else block.mixer.put_rows(state, kept, part)


def _targets(labels: Tensor, cu_seqlens: Tensor | None, unpadding: Unpadding | None, shifted: bool) -> Tensor:
    """What each token that the layers saw is scored on, IGNORED for none: its document's next label, or with `shifted` its own."""
    targets = (labels if unpadding is None else unpadding.take(labels)).long()
    if shifted:
        return targets
    cu_seqlens = cu_seqlens if unpadding is None else unpadding.cu_seqlens
    following = torch.full_like(targets, IGNORED)
    following[:, :-1] = targets[:, 1:]
    if cu_seqlens is not None:
        following[:, cu_seqlens[1:].long() - 1] = IGNORED
    return following


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the scored tokens of -log p(target), in fp32 or wider."""
    return cross_entropy(wide(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")

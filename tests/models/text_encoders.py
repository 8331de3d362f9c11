"""Tiny random text encoders, made and saved by transformers, which is the oracle for their hidden states and labels."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import WordPiece
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from forebay.layers.context import ForwardContext
from forebay.models.network import Network
from forebay.ops.reference.attention import PagedKv
from forebay.pools.cache_pool import CachePool
from tests.models import jina_bert
from tests.pools.caches import cache_types

jina_bert.register()

VOCAB: Final = 96
FIRST: Final = 5  # of the ids that stand for no padding
BASE: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SHARED: Final = ("vocab_size", "max_position_embeddings", "pad_token_id")
HEADS: Final = {"text": AutoModelForSequenceClassification, "tokens": AutoModelForTokenClassification, "": AutoModel}

_IDS: Final = dict.fromkeys(("bos_token_id", "cls_token_id"), 1) | dict.fromkeys(("eos_token_id", "sep_token_id"), 2)

# (model type, what differs from BASE)
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "bert": ("bert", {"type_vocab_size": 2}),
    "roberta": ("roberta", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm_roberta": ("xlm-roberta", {"type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "relu"}),
    "distilbert": (
        "distilbert",
        {"dim": 48, "n_heads": 4, "n_layers": 3, "hidden_dim": 80},
    ),
    "mpnet": ("mpnet", {"pad_token_id": 1, "max_position_embeddings": 300}),
    "nomic_bert": ("nomic_bert", {"type_vocab_size": 2, "num_attention_heads": 3}),
    "gte": ("gte", {"type_vocab_size": 2}),
    "gte-without-types": ("gte", {"type_vocab_size": 0, "rope_theta": 500.0}),
    "modernbert": ("modernbert", {**_IDS, "local_attention": 8}),
    "modernbert-biases": (
        "modernbert",
        {
            **_IDS,
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
            "local_attention": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "classifier_pooling": "mean",
        },
    ),
    "deberta_v2": (
        "deberta-v2",
        {
            "relative_attention": True,
            "position_buckets": 16,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "position_biased_input": False,
            "pooler_hidden_size": 48,
        },
    ),
    "deberta-own-keys": (
        "deberta-v2",
        {
            "relative_attention": True,
            "max_relative_positions": 12,
            "pos_att_type": ["c2p", "p2c"],
            "type_vocab_size": 2,
            "pooler_hidden_size": 48,
        },
    ),
    "jina_bert_v2": (
        "jina_bert_v2",
        {
            "type_vocab_size": 2,
            "num_attention_heads": 6,  # no power of two
            "position_embedding_type": "alibi",
            "feed_forward_type": "geglu",
        },
    ),
    "eurobert": (
        "eurobert",
        {**_IDS, "mask_token_id": 4, "num_key_value_heads": 2, "head_dim": 16, "classifier_pooling": "bos"},
    ),
    "eurobert-biases": (
        "eurobert",
        {**_IDS, "mask_token_id": 4, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            "hidden_size": 64,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "use_bidirectional_attention": True,
        },
    ),
    "bert-tanh-gelu": ("bert", {"type_vocab_size": 3, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
}


@dataclass(frozen=True)
class TinyEncoder:
    """A saved checkpoint, and the model that wrote it."""

    path: Path
    oracle: Any
    num_types: int

    def hidden(self, ids: Sequence[int]) -> Tensor:
        """Return the hidden states of one text, [tokens, hidden size]; of ids from VOCAB on the kind is another."""
        states: Tensor = self._run(ids).last_hidden_state[0]
        return states

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return the logits of the head: [labels], or [tokens, labels]."""
        logits: Tensor = self._run(ids).logits[0]
        return logits

    def _run(self, ids: Sequence[int]) -> Any:
        given = torch.tensor([ids])
        kinds = {"token_type_ids": given // VOCAB} if self.num_types else {}
        with torch.no_grad():
            return self.oracle(given % VOCAB, attention_mask=torch.ones_like(given), **kinds)


def make_encoder(
    case: str, folder: Path, *, head: str = "", seed: int = 0, num_labels: int = 3, **changes: Any
) -> TinyEncoder:
    """Save a tiny encoder with weights so large that each part counts."""
    model_type, own = CASES[case]
    base = {name: BASE[name] for name in SHARED} if "dim" in own else BASE
    config = AutoConfig.for_model(model_type, **{**base, **own, **changes}, num_labels=num_labels)
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model: Any = HEADS[head].from_config(config)  # type: ignore[no-untyped-call]
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            center = 1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0
            weight.copy_(center + 0.15 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    return TinyEncoder(folder, model, getattr(config, "type_vocab_size", 0))


@functools.cache
def shared_encoder(case: str, head: str = "") -> TinyEncoder:
    """The checkpoint of a case, made once in a process. It is everybody's: write nothing into its folder."""
    return make_encoder(case, Path(tempfile.mkdtemp(prefix="forebay-encoder-")) / case, head=head)


def some_ids(count: int, seed: int, num_types: int = 1) -> list[int]:
    """Return random ids; with several kinds of tokens the second half is of another kind than the first."""
    ids = torch.randint(FIRST, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    kinds = torch.arange(count) * num_types // max(1, count)
    return (ids + kinds * VOCAB).tolist()


def compute(model: Network, texts: Sequence[Sequence[int]], device: str = "cpu") -> list[Tensor]:
    """Return the hidden states of each text, of one step with all of them."""
    with torch.device(device):
        return _compute(model, texts, device)


def _compute(model: Network, texts: Sequence[Sequence[int]], device: str) -> list[Tensor]:
    counts = torch.tensor([len(ids) for ids in texts])
    q_start = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(len(ids)) for ids in texts])
    full = PagedKv(
        page_table=torch.zeros(len(texts) + 1, 1, dtype=torch.int32),
        rows=torch.arange(1, len(texts) + 1, dtype=torch.int32),
        q_start=q_start,
        seq_lens=counts.int(),
        page_size=64,
        out_cache_loc=torch.zeros(len(positions), dtype=torch.int64),
    )
    cache = CachePool((), cache_types(torch.float32), page_size=64, num_slots={"kv": len(texts)}, device=device)
    ctx = ForwardContext(positions=positions, kinds={"kv": full}, cache=cache)
    hidden = model.forward(ctx, torch.tensor([token for ids in texts for token in ids], dtype=torch.int64))
    return list(torch.split(hidden, counts.tolist()))


def write_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer of letters into the folder, with BERT's tokens around a text or a pair."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    words += [*letters, *(f"##{letter}" for letter in letters)]
    made = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.add_special_tokens(words[:5])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    made.decoder = WordPiece()
    made.save(str(folder / "tokenizer.json"))

"""Encoders: a Hugging Face model with pooling, a saved SentenceTransformer, or a small BERT made from
scratch."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from raoe_train.config import ModelConfig, ScratchConfig

logger = logging.getLogger(__name__)

# our name: sentence-transformers' name
POOLING = {"mean": "mean", "cls": "cls", "max": "max", "last": "lasttoken"}
SCRATCH = "scratch"


def load_encoder(config: ModelConfig, *, sentences: Iterable[str] | None = None, seed: int = 42) -> Any:
    """The SentenceTransformer that `config` describes.

    Args:
        config: see ModelConfig. Pooling defaults to what a SentenceTransformer was saved with; for a bare
            encoder to
            cls for ModernBERT and mean for all others (the RAOE paper's Table 5).
        sentences: what the tokenizer of a model made from scratch is trained on.
        seed: of the weights, where ``config.random_weights`` asks for new ones.

    Raises:
        ValueError: unknown pooling, or no sentences for a model from scratch.
        FileNotFoundError: a path that is not there.
    """
    from sentence_transformers import SentenceTransformer

    if config.pooling is not None and config.pooling not in POOLING:
        raise ValueError(f"model.pooling must be one of {', '.join(POOLING)}, got {config.pooling!r}")
    if config.name == SCRATCH:
        if sentences is None:
            raise ValueError(f"model.name {SCRATCH!r} makes a new model, which only training can do")
        modules = [_scratch_transformer(config.scratch, sentences, config.max_seq_length)]
        model = SentenceTransformer(
            modules=[*modules, _pooling(modules[0], config.pooling)], device=config.device
        )
    else:
        model = _load(config)
    if config.random_weights:
        _draw_weights(model, seed)
    if config.prompt is not None:
        model.prompts = {**model.prompts, "default": config.prompt}
        model.default_prompt_name = "default"
    if config.max_seq_length is not None:
        model.max_seq_length = config.max_seq_length
    _check_positions(model)
    return model


def _load(config: ModelConfig) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sentence_transformers.util import is_sentence_transformer_model

    _check_path(config.name)
    hub: dict[str, Any] = {"trust_remote_code": config.trust_remote_code, "revision": config.revision}
    changes = {} if config.dropout is None else _dropout_keys(config, hub)
    if is_sentence_transformer_model(config.name, revision=config.revision):
        model = SentenceTransformer(config.name, device=config.device, config_kwargs=changes, **hub)
        if config.pooling is not None:
            places = [name for name, module in model.named_children() if isinstance(module, Pooling)]
            if len(places) != 1:
                raise ValueError(
                    f"model.pooling cannot be changed: {config.name} has {len(places)} pooling modules"
                )
            # Set the attribute, do not rebuild the container: modules keep their order and names.
            model._modules[places[0]] = Pooling(
                model._modules[places[0]].embedding_dimension, POOLING[config.pooling]
            )
        return model
    transformer = Transformer(
        config.name, model_kwargs=dict(hub), processor_kwargs=dict(hub), config_kwargs={**hub, **changes}
    )
    if transformer.tokenizer.pad_token is None:  # decoders often have none
        transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    return SentenceTransformer(
        modules=[transformer, _pooling(transformer, config.pooling)], device=config.device
    )


def _pooling(transformer: Any, pooling: str | None) -> Any:
    from sentence_transformers.sentence_transformer.modules import Pooling

    if pooling is None:
        pooling = "cls" if transformer.model.config.model_type == "modernbert" else "mean"
    return Pooling(transformer.get_embedding_dimension(), POOLING[pooling])


def _check_path(name: str) -> None:
    from pathlib import Path

    # A hub name is OWNER/NAME or NAME; all else that looks like a path is one.
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"no such model directory: {name}")


def _dropout_keys(config: ModelConfig, hub: dict[str, Any]) -> dict[str, float]:
    from pathlib import Path

    from transformers import AutoConfig

    # Older SentenceTransformers keep the encoder in a sub-folder.
    inner = Path(config.name) / "0_Transformer"
    found = AutoConfig.from_pretrained(str(inner) if inner.is_dir() else config.name, **hub).to_dict()
    names = [name for name, value in found.items() if "dropout" in name and isinstance(value, (int, float))]
    if not names:
        raise ValueError(f"model.dropout: {config.name} has no dropout to set")
    return {name: config.dropout for name in names}  # type: ignore[misc]


def _draw_weights(model: Any, seed: int) -> None:
    import torch
    from transformers import AutoModel

    old = model[0].model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        new = AutoModel.from_config(old.config)
    # A saved encoder may lack the pooler that a new one has; then the old one's parts decide.
    missing, _ = old.load_state_dict(new.state_dict(), strict=False)
    if missing:
        raise ValueError(f"model.random_weights cannot make weights for {', '.join(missing[:3])}")


def _scratch_transformer(config: ScratchConfig, sentences: Iterable[str], max_seq_length: int | None) -> Any:
    """A BERT with random weights and a lower-casing WordPiece tokenizer trained on `sentences`."""
    import tempfile
    from pathlib import Path

    import torch
    from sentence_transformers.sentence_transformer.modules import Transformer
    from transformers import BertConfig, BertModel, BertTokenizer

    length = max_seq_length or 64
    words = _train_word_pieces(sentences, config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder, "vocab.txt")
        vocabulary.write_text("\n".join(words) + "\n", encoding="utf-8")
        tokenizer = BertTokenizer(vocab=str(vocabulary), model_max_length=length)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            bert = BertModel(
                BertConfig(
                    vocab_size=len(words),
                    hidden_size=config.hidden_size,
                    num_hidden_layers=config.layers,
                    num_attention_heads=config.heads,
                    intermediate_size=config.intermediate_size,
                    max_position_embeddings=length,
                    hidden_dropout_prob=config.dropout,
                    attention_probs_dropout_prob=config.dropout,
                    pad_token_id=tokenizer.pad_token_id,
                )
            )
        bert.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return Transformer(folder, max_seq_length=length)


def _train_word_pieces(sentences: Iterable[str], vocab_size: int) -> list[str]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    lines = [normalizer.normalize_str(sentence) for sentence in sentences]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # The trainer breaks ties of frequency by id, and would give ids to inner letters in the random order of a
    # hash table: named beforehand, they have the same ones in every process.
    inner = [
        f"##{letter}"
        for letter in sorted({letter for line in lines for letter in line if not letter.isspace()})
    ]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[*special, *inner], show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


def _check_positions(model: Any) -> None:
    limit = getattr(model[0].model.config, "max_position_embeddings", None)
    if limit is not None and model.max_seq_length is not None and model.max_seq_length > limit:
        raise ValueError(
            f"model.max_seq_length is {model.max_seq_length}, but the encoder has only {limit} positions"
        )

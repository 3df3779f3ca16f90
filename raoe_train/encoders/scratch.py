"""Create new models and parts of models: a small BERT with its tokenizer, SimCSE's training head and LoRA adapters."""

import inspect
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
import transformers as hf
from sentence_transformers.sentence_transformer.modules import Dense, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

SIZES = {"vocab_size": 4000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 256}  # fmt: skip


def scratch_transformer(
    settings: Mapping[str, Any], sentences: Iterable[str], max_seq_length: int | None, seed: int
) -> Transformer:
    """Create a small BERT for texts of up to max_seq_length tokens (default 64), and train its WordPiece tokenizer.
    `settings` are fields of transformers.BertConfig, which override the defaults in SIZES."""
    if unknown := settings.keys() - inspect.signature(hf.BertConfig).parameters.keys():
        raise ValueError(f"unknown key model.scratch.{min(unknown)}: use fields of transformers.BertConfig")
    length, sizes = max_seq_length or 64, {**SIZES, **settings}
    words = train_word_pieces(sentences, sizes["vocab_size"])
    tokenizer = hf.BertTokenizer(vocab={word: number for number, word in enumerate(words)}, model_max_length=length)
    sizes |= {"vocab_size": len(words), "pad_token_id": tokenizer.pad_token_id}
    config = hf.BertConfig(**{"max_position_embeddings": length, **sizes})
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hf.BertModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return Transformer(folder, max_seq_length=length)


def train_word_pieces(sentences: Iterable[str], vocab_size: int) -> list[str]:
    """Train a lower-casing WordPiece tokenizer. Return the vocabulary sorted by id, identical in all processes."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    lines = [normalizer.normalize_str(sentence) for sentence in sentences]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # The trainer breaks ties in frequency by id, and gives inner letters (##a) ids in the random order of a hash table.
    # Declared as special tokens, inner letters get fixed ids.
    inner = [f"##{letter}" for letter in sorted({letter for line in lines for letter in line if not letter.isspace()})]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[*special, *inner], show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    ids = tokenizer.get_vocab()
    return sorted(ids, key=ids.__getitem__)


class TrainingHead(Dense):
    """SimCSE's training head (mlp_only_train): a linear layer and tanh in training, and the identity in evaluation."""

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return super().forward(features) if self.training else features


def add_head(model: Any, seed: int, saved: bool) -> None:
    """Append a TrainingHead to a SentenceTransformer. If `saved`, copy the head's weights from the pooler, where SimCSE
    checkpoints store them. Otherwise, or without a saved pooler, initialize the head like the encoder's weights."""
    inner, width, weight = model.transformers_model, model.get_embedding_dimension(), next(model.parameters())
    pooler = getattr(getattr(inner, "pooler", None), "dense", None)
    if saved and pooler is not None and getattr(pooler.weight, "_is_hf_initialized", False):
        start, bias = pooler.weight.detach().clone(), pooler.bias.detach().clone()
    else:
        std, seeded = getattr(inner.config, "initializer_range", 0.02), torch.Generator().manual_seed(seed)
        start, bias = std * torch.randn(width, width, generator=seeded, device="cpu"), torch.zeros(width, device="cpu")
    head = TrainingHead(width, width, init_weight=start, init_bias=bias)
    model.append(head.to(model.device, weight.dtype))


def drop_head(model: Any) -> None:
    for name, module in list(model.named_children()):
        if isinstance(module, TrainingHead):
            del model._modules[name]


def add_lora(model: Any, settings: Mapping[str, Any]) -> None:
    """Freeze a transformers model and add a trainable LoRA adapter in float32, or make an existing adapter trainable.

    Args:
        settings: fields of peft.LoraConfig. Without target_modules, all linear layers get an adapter.
    """
    from peft import LoraConfig, TaskType, prepare_model_for_kbit_training

    if unknown := sorted(set(settings) - {field.name for field in fields(LoraConfig) if field.init}):
        raise ValueError(f"unknown key model.lora.{unknown[0]}: use fields of peft.LoraConfig")
    defaults = {"target_modules": "all-linear", "task_type": TaskType.FEATURE_EXTRACTION}
    config = LoraConfig(**{**defaults, **settings})
    if getattr(model, "_hf_peft_config_loaded", False):
        (adapter,) = model.peft_config.values()
        changed = [key for key in settings if getattr(adapter, key) != getattr(config, key) and key != "target_modules"]
        if changed:
            advice = "set model.lora to {} to train this adapter, or merge it first with raoe-train export --merge"
            raise ValueError(f"the model's LoRA adapter and model.lora differ in {', '.join(changed)}: {advice}")
    else:
        if getattr(model, "is_loaded_in_4bit", False):  # also converts norms and embeddings to float32
            prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        else:
            model.requires_grad_(False)
        model.add_adapter(config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.requires_grad_(True)
            parameter.data = parameter.data.to(torch.float32)

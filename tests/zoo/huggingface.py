"""Families of the package `transformers`, tiny and from their configs, with random weights; nothing is downloaded.

A row names the class, the kind of its batches, and what differs from the defaults of its kind.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.case import Batch, Case, MakeBatch, by_name, integers, numbers

WORDS, LENGTH, PIXELS, FRAMES, CLASSES = 64, 8, 32, 800, 4
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_TEXT = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, **_SPECIAL,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_VISION = {
    "image_size": PIXELS, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_labels": CLASSES,
}  # fmt: skip
_GPT2 = {"vocab_size": WORDS, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, **_SPECIAL}
_EXPERTS = {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm",
}  # fmt: skip
_BOTH_SIDES = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "decoder_start_token_id": 1, **_SPECIAL,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, **_SPECIAL,
}  # fmt: skip
_SWIN = {
    "image_size": PIXELS, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4,
    "num_labels": CLASSES,
}  # fmt: skip
_SPEECH = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "num_labels": CLASSES,
    "classifier_proj_size": 16, "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip


def _words(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(3, WORDS, (samples, LENGTH), generator=generator)


_labels = integers(CLASSES)


def _next_words(samples: int, generator: torch.Generator) -> Batch:
    words = _words(samples, generator)
    return {"input_ids": words, "labels": words}


def _padded(samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    lengths = torch.randint(4, LENGTH + 1, (samples, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    return {"input_ids": _words(samples, generator).masked_fill(~mask, 0), "attention_mask": mask.long()}


def _masked_words(samples: int, generator: torch.Generator) -> Batch:
    return {**_padded(samples, generator), "labels": _words(samples, generator)}


def _sentences(samples: int, generator: torch.Generator) -> Batch:
    return {**_padded(samples, generator), "labels": _labels(samples, generator)}


_pixels = numbers(3, PIXELS, PIXELS)
_images, _captions = by_name(pixel_values=_pixels, labels=_labels), by_name(input_ids=_words, pixel_values=_pixels)
_segmented = by_name(pixel_values=_pixels, labels=integers(CLASSES, PIXELS, PIXELS))
_sounds = by_name(input_values=numbers(FRAMES), labels=_labels)
_spoken = by_name(input_features=numbers(16, 32), labels=_words)
_spectrograms = by_name(input_values=numbers(32, 16), labels=_labels)

_series = by_name(
    past_values=numbers(15),
    past_time_features=numbers(15, 1),
    past_observed_mask=lambda samples, _: torch.ones(samples, 15),
    future_values=numbers(4),
    future_time_features=numbers(4, 1),
)
_channels = by_name(past_values=numbers(16, 2), future_values=numbers(4, 2))


def _family(class_name: str, config: dict[str, Any]) -> nn.Module:
    import transformers

    kind = getattr(transformers, class_name)
    model: nn.Module = kind(kind.config_class(**config))
    return model


class Contrastive(nn.Module):
    """A model of pictures and texts with the loss between them."""

    def __init__(self, class_name: str, config: dict[str, Any]) -> None:
        super().__init__()
        self.both = _family(class_name, config)

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        loss: Tensor = self.both(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss
        return loss


def _entry(class_name: str, batch: MakeBatch, config: dict[str, Any], **changed: Any) -> Case:
    name = class_name.removesuffix("LMHeadModel").removesuffix("MTModel").split("For")[0] or class_name
    name = {"Ro": "RoFormer"}.get(name, name).lower()
    return Case(name, partial(_family, class_name, {**config, **changed}), batch, package="transformers")


def _alike(class_names: str, batch: MakeBatch, config: dict[str, Any], **changed: Any) -> tuple[Case, ...]:
    return tuple(_entry(class_name, batch, config, **changed) for class_name in class_names.split())


HUGGINGFACE = (
    # Encoders of text.
    *_alike("BertForMaskedLM MPNetForMaskedLM ModernBertForMaskedLM", _masked_words, _TEXT),
    *_alike("AlbertForMaskedLM ElectraForMaskedLM", _masked_words, _TEXT, embedding_size=16),
    *_alike("ConvBertForMaskedLM SqueezeBertForMaskedLM RoFormerForMaskedLM", _masked_words, _TEXT, embedding_size=32),
    _entry("RobertaForSequenceClassification", _sentences, _TEXT, num_labels=CLASSES),
    _entry("XLMRobertaForTokenClassification", _masked_words, _TEXT, num_labels=WORDS),
    _entry("DistilBertForSequenceClassification", _sentences, {
        "vocab_size": WORDS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32,
        "num_labels": CLASSES,
    }),
    _entry("DebertaForSequenceClassification", _sentences, _TEXT, num_labels=CLASSES, relative_attention=True),
    _entry("DebertaV2ForSequenceClassification", _sentences, _TEXT, num_labels=CLASSES, relative_attention=True,
           pos_att_type=["p2c", "c2p"]),
    _entry("XLNetForSequenceClassification", _sentences, {
        "vocab_size": WORDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "num_labels": CLASSES,
    }),
    _entry("FunnelForSequenceClassification", _sentences, {
        "vocab_size": WORDS, "block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48,
        "num_labels": CLASSES,
    }),
    _entry("LongformerForSequenceClassification", _sentences, _TEXT, num_labels=CLASSES, attention_window=4),
    _entry("BigBirdForMaskedLM", _masked_words, _TEXT, attention_type="original_full"),
    _entry("MobileBertForMaskedLM", _masked_words, _TEXT, embedding_size=32, intra_bottleneck_size=32,
           true_hidden_size=32),
    _entry("FNetForMaskedLM", _next_words, _TEXT),
    _entry("EsmForMaskedLM", _masked_words, _TEXT, mask_token_id=3),
    _entry("NystromformerForMaskedLM", _masked_words, _TEXT, num_landmarks=8, segment_means_seq_len=8),
    # Decoders of text.
    _entry("GPT2LMHeadModel", _next_words, _GPT2),
    _entry("GPTNeoForCausalLM", _next_words, {
        "vocab_size": WORDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]], "window_size": 4, **_SPECIAL,
    }),
    _entry("GPTNeoXForCausalLM", _next_words, _TEXT),
    *_alike("GPTJForCausalLM CodeGenForCausalLM", _next_words, _GPT2, rotary_dim=4),
    _entry("OPTForCausalLM", _next_words, _TEXT, ffn_dim=48, word_embed_proj_dim=32),
    _entry("BloomForCausalLM", _next_words, _TEXT, n_layer=2, n_head=4),
    *_alike("LlamaForCausalLM Qwen2ForCausalLM PhiForCausalLM Phi3ForCausalLM StableLmForCausalLM Olmo2ForCausalLM "
            "CohereForCausalLM GraniteForCausalLM Starcoder2ForCausalLM", _next_words, _GROUPED),
    _entry("MistralForCausalLM", _next_words, _GROUPED, sliding_window=4),
    *_alike("Qwen3ForCausalLM GemmaForCausalLM", _next_words, _GROUPED, head_dim=8),
    _entry("Gemma2ForCausalLM", _next_words, _GROUPED, head_dim=8, sliding_window=4),
    _entry("FalconForCausalLM", _next_words, _TEXT, new_decoder_architecture=False),
    _entry("MptForCausalLM", _next_words, {
        "vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32, "expansion_ratio": 2,
    }),
    _entry("MixtralForCausalLM", _next_words, _GROUPED, num_local_experts=4, num_experts_per_tok=2,
           experts_implementation="batched_mm"),
    _entry("Qwen2MoeForCausalLM", _next_words, _GROUPED, **_EXPERTS, shared_expert_intermediate_size=24),
    _entry("Qwen3MoeForCausalLM", _next_words, _GROUPED, **_EXPERTS, head_dim=8),
    _entry("MambaForCausalLM", _next_words, {
        "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4,
    }),
    # Encoders with decoders.
    *_alike("T5ForConditionalGeneration MT5ForConditionalGeneration", _masked_words, _T5),
    *_alike("BartForConditionalGeneration PegasusForConditionalGeneration MarianMTModel", _masked_words, _BOTH_SIDES),
    _entry("LEDForConditionalGeneration", _masked_words, _BOTH_SIDES, attention_window=4,
           max_encoder_position_embeddings=32, max_decoder_position_embeddings=32),
    # Images.
    *_alike("ViTForImageClassification DeiTForImageClassification BeitForImageClassification "
            "Dinov2ForImageClassification", _images, _VISION),
    *_alike("SwinForImageClassification Swinv2ForImageClassification", _images, _SWIN),
    _entry("ConvNextForImageClassification", _images, {
        "depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2, "num_labels": CLASSES,
    }),
    _entry("ResNetForImageClassification", _images, {
        "embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": CLASSES,
    }),
    _entry("SegformerForSemanticSegmentation", _segmented, {
        "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
        "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2],
        "decoder_hidden_size": 32, "num_labels": CLASSES,
    }),
    Case("clip", partial(Contrastive, "CLIPModel", {
        "text_config": _TEXT, "vision_config": _VISION, "projection_dim": 16,
    }), _captions, package="transformers"),
    # Sound and time series.
    *_alike("Wav2Vec2ForSequenceClassification HubertForSequenceClassification WavLMForSequenceClassification",
            _sounds, _SPEECH),
    _entry("WhisperForConditionalGeneration", _spoken, _BOTH_SIDES, num_mel_bins=16, max_source_positions=16,
           max_target_positions=32),
    _entry("ASTForAudioClassification", _spectrograms, _VISION, num_mel_bins=16, max_length=32, patch_size=8,
           time_stride=8, frequency_stride=8),
    _entry("TimeSeriesTransformerForPrediction", _series, {
        "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 7], "num_time_features": 1,
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    }),
    _entry("PatchTSTForPrediction", _channels, {
        "num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "prediction_length": 4,
        "d_model": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 32,
    }),
)  # fmt: skip

"""The fields of a SentencePiece model that are read here; the others are kept as they are.

Not by the package's own `sentencepiece_model_pb2`, which can only be imported beside the newest
protobuf, where Apache Beam and TensorFlow need an earlier one.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# The values of `TrainerSpec.ModelType` and of `SentencePiece.Type` that matter.
UNIGRAMS, BPE = (1, 4), 2  # characters are unigrams too
NORMAL, USER_DEFINED = 1, 4
# Name, number, type, and default of each field, from `sentencepiece_model.proto`.
_MESSAGES = {
    "Piece": [("piece", 1, "STRING", ""), ("score", 2, "FLOAT", "0"), ("type", 3, "INT32", "1")],
    "Trainer": [
        ("model_type", 3, "INT32", "1"),
        ("split_by_whitespace", 22, "BOOL", "true"),
        ("treat_whitespace_as_suffix", 24, "BOOL", "false"),
        ("byte_fallback", 35, "BOOL", "false"),
    ],
    "Normalizer": [
        ("precompiled_charsmap", 2, "BYTES", ""),
        ("add_dummy_prefix", 3, "BOOL", "true"),
        ("remove_extra_whitespaces", 4, "BOOL", "true"),
        ("escape_whitespaces", 5, "BOOL", "true"),
    ],
    "Model": [
        ("pieces", 1, "Piece", ""),
        ("trainer_spec", 2, "Trainer", ""),
        ("normalizer_spec", 3, "Normalizer", ""),
    ],
}


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="model.proto", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, number, kind, default in fields:
            field = described.field.add(name=name, number=number)
            is_repeated = name == "pieces"
            field.label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{kind}"
            else:
                field.type, field.default_value = getattr(field, f"TYPE_{kind}"), default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


Model = _message_class()

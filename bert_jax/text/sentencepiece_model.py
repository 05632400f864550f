"""The fields of a SentencePiece model that are read here; the others are kept as they are.

Not by the package's own `sentencepiece_model_pb2`, which can only be imported beside the newest
protobuf, where Apache Beam and TensorFlow need an earlier one.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# The values of `TrainerSpec.ModelType` and of `SentencePiece.Type` that matter.
UNIGRAM, BPE, CHARACTERS = 1, 2, 4
NORMAL, USER_DEFINED = 1, 4
# The number, name, type and default of each field, from `sentencepiece_model.proto`.
_MESSAGES = {
    "Piece": "1 piece STRING, 2 score FLOAT 0, 3 type INT32 1",
    "Trainer": "3 model_type INT32 1, 22 split_by_whitespace BOOL true, "
    "24 treat_whitespace_as_suffix BOOL false, 35 byte_fallback BOOL false",
    "Normalizer": "2 precompiled_charsmap BYTES, 3 add_dummy_prefix BOOL true, "
    "4 remove_extra_whitespaces BOOL true, 5 escape_whitespaces BOOL true",
    "Model": "1 pieces Piece, 2 trainer_spec Trainer, 3 normalizer_spec Normalizer",
}


def _message_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="model.proto", syntax="proto2")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for text in fields.split(", "):
            number, name, kind, *default = text.split()
            field = described.field.add(name=name, number=int(number))
            field.label = field.LABEL_REPEATED if name == "pieces" else field.LABEL_OPTIONAL
            if kind in _MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{kind}"
            else:
                field.type = getattr(field, f"TYPE_{kind}")
                field.default_value = "".join(default)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Model"))


Model = _message_class()

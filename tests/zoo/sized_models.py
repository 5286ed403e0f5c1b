"""Models of the zoo with batches of five sizes each, and how many builds eager mode's own branches on those sizes require."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.zoo import (
    diffusers_models,
    graph_models,
    plain_models,
    transformers_decoders,
    transformers_encoders,
    transformers_vision,
)
from tests.zoo.model import ADAMW, Batch, ZooModel
from tests.zoo.sized_batches import (
    captioned_images,
    cells,
    classes,
    description,
    graphs,
    images,
    labelled_images,
    labelled_text,
    looped_nodes,
    nodes,
    noise,
    padded_text,
    pictures,
    plain_images,
    points,
    segmented_images,
    spectrograms,
    tagged,
    text,
    translated_text,
    translations,
    vectors,
    waves,
)

Size = tuple[int, ...]
_ZOO = {
    str(model): model
    for module in (
        transformers_decoders,
        transformers_encoders,
        transformers_vision,
        diffusers_models,
        graph_models,
        plain_models,
    )
    for model in module.MODELS
}


@dataclass(frozen=True)
class SizedModel:
    """A row: what varies of a model's batches, the sizes in the order of the steps, and the builds that they take."""

    model: ZooModel
    varies: str
    sizes: tuple[Size, ...]
    batch: Callable[..., Batch]  # of a generator and a size
    builds: int
    why: str = ""

    def __str__(self) -> str:
        return str(self.model)

    def columns(self, builds: int) -> tuple[str, ...]:
        """The row of a table, with the builds that were made."""
        sizes = ", ".join(" x ".join(map(str, size)) for size in self.sizes)
        return self.model.name, self.varies, sizes, str(builds), self.why


def row(
    name: str,
    varies: str,
    sizes: tuple[Size, ...],
    batch: Callable[..., Batch],
    builds: int = 2,
    why: str = "",
) -> SizedModel:
    """A model of the zoo under AdamW."""
    return SizedModel(replace(_ZOO[name], training=ADAMW), varies, sizes, batch, builds, why)


LENGTHS = ((3, 8), (3, 13), (3, 5), (3, 31), (3, 20))
LONG = ((3, 8), (3, 13), (3, 5), (3, 97), (3, 30))
FULL = ((3, 8), (3, 13), (3, 5), (3, 16), (3, 2))  # up to all places that there are
BOTH = ((3, 8), (5, 13), (2, 5), (7, 31), (4, 20))
PAIRS = ((3, 8, 6), (3, 13, 7), (3, 5, 9), (3, 31, 23), (3, 4, 4))
ROWS = ((4, 8, 8), (7, 8, 8), (2, 8, 8), (37, 8, 8), (12, 8, 8))
SIDES = ((2, 32, 32), (2, 40, 48), (2, 24, 37), (2, 97, 41), (2, 64, 32))
EVEN = ((2, 8, 8), (2, 16, 12), (2, 4, 12), (2, 20, 28), (2, 12, 8))
WORDED = ((2, 8, 8, 5), (2, 16, 12, 7), (2, 4, 12, 3), (2, 20, 28, 11), (2, 12, 8, 2))
PATCHES = ((2, 8, 8), (3, 16, 12), (5, 4, 12), (4, 20, 28), (2, 12, 8))
WINDOWS = ((2, 8, 8), (2, 16, 12), (2, 13, 21), (2, 20, 28), (2, 11, 8))
NODES = ((12, 30), (20, 31), (7, 55), (97, 401), (15, 21))

LENGTH, EDGES, ONE = "length", "nodes, edges", "for a batch of one torch runs other ops"
TRANSFORMERS = [
    row("transformers-bert", "batch, length", BOTH, padded_text),
    row("transformers-roberta", LENGTH, LENGTHS, labelled_text),
    row("transformers-distilbert", "batch, length", BOTH, labelled_text),
    row("transformers-deberta", LENGTH, LENGTHS, padded_text, 5, "reads the span, a tensor, as an index"),
    row("transformers-deberta-v2", LENGTH, LENGTHS, labelled_text),
    row("transformers-modernbert", LENGTH, LENGTHS, padded_text),
    row("transformers-albert", LENGTH, LENGTHS, padded_text),
    row("transformers-fnet", LENGTH, LENGTHS, text),
    row("transformers-funnel", LENGTH, LENGTHS, padded_text, 5, "`list(range(seq_len))`"),
    row("transformers-convbert", LENGTH, LENGTHS, labelled_text),
    row(
        "transformers-longformer",
        LENGTH,
        ((3, 8), (3, 13), (3, 5), (3, 29), (3, 20)),
        labelled_text,
        5,
        "`torch.div` of a length, read as a size",
    ),
    row("transformers-gpt2", LENGTH, FULL, text),
    row("transformers-gpt_neo", LENGTH, FULL, text, 3, "the mask of all 16 places is a block of memory"),
    row("transformers-gptj", LENGTH, LONG, text),
    row("transformers-opt", LENGTH, LENGTHS, padded_text),
    row("transformers-mpt", LENGTH, FULL, text, 3, "`max(0, 16 - length)`"),
    row("transformers-bloom", LENGTH, LONG, padded_text),
    row(
        "transformers-llama",
        "batch, length",
        ((3, 8), (5, 13), (2, 5), (7, 97), (1, 20)),
        padded_text,
        3,
        ONE,
    ),
    row("transformers-gemma2", LENGTH, LONG, text),
    row(
        "transformers-deepseek_v3",
        LENGTH,
        LONG,
        text,
        5,
        "grouped matmul is traced on values, whose sizes are numbers",
    ),
    row(
        "transformers-mamba",
        LENGTH,
        ((2, 8), (2, 13), (2, 5), (2, 19), (2, 10)),
        text,
        5,
        "a loop over the length",
    ),
    row("transformers-mamba2", LENGTH, LONG, text),
    row(
        "transformers-rwkv",
        LENGTH,
        ((2, 8), (2, 13), (2, 5), (2, 19), (2, 10)),
        text,
        5,
        "a loop over the length",
    ),
    row("transformers-xlnet", LENGTH, LONG, text),
    row(
        "transformers-t5",
        "two lengths",
        ((3, 8, 6), (3, 13, 7), (3, 5, 9), (3, 97, 23), (3, 4, 4)),
        translated_text,
    ),
    row("transformers-bart", "two lengths", PAIRS, translated_text),
    row("transformers-vit", "batch", ROWS, labelled_images),
    row("transformers-vit_mae", "batch", ROWS, images),
    row(
        "transformers-dinov2",
        "batch, sides",
        PATCHES,
        labelled_images,
        3,
        "for one row of patches torch runs other ops",
    ),
    row(
        "transformers-swin",
        "sides",
        WINDOWS,
        labelled_images,
        5,
        "pads odd sides, and keeps the smallest side as its window",
    ),
    row("transformers-convnext", "sides", SIDES, labelled_images),
    row(
        "transformers-resnet",
        "batch, sides",
        ((2, 32, 32), (3, 40, 48), (5, 24, 37), (4, 97, 41), (1, 64, 32)),
        labelled_images,
        3,
        "for a batch of one torch chooses kernels by the sides",
    ),
    row("transformers-segformer", "sides", SIDES, segmented_images),
    row("transformers-clip", "batch, length", BOTH, captioned_images),
    row(
        "transformers-whisper",
        "batch, target length",
        ((2, 5), (3, 7), (5, 3), (7, 13), (4, 11)),
        spectrograms,
    ),
    row(
        "transformers-wav2vec2",
        "samples",
        ((2, 200), (2, 223), (2, 300), (2, 401), (2, 1009)),
        waves,
        5,
        "the CTC loss takes lengths, and has no shape function",
    ),
]
OTHERS = [
    row("diffusers-UNet2DModel", "sides", EVEN, noise(3)),
    row(
        "diffusers-UNet2DConditionModel", "sides, words", WORDED, noise(4, encoder_hidden_states=description)
    ),
    row("diffusers-AutoencoderKL", "sides", EVEN, plain_images),
    row(
        "diffusers-VQModel",
        "sides",
        EVEN,
        plain_images,
        3,
        "torch.cdist takes another kernel for 25 rows or fewer",
    ),
    row("diffusers-DiTTransformer2DModel", "batch", ROWS, noise(4, class_labels=classes)),
    row("torch_geometric-GCN", EDGES, NODES, looped_nodes),
    row("torch_geometric-GCN/own loops", EDGES, NODES, nodes, 5, "counts the loops that are there"),
    row("torch_geometric-GAT", EDGES, NODES, looped_nodes),
    row("torch_geometric-GIN", EDGES, NODES, nodes),
    row("torch_geometric-PNA", EDGES, NODES, nodes),
    row("torch_geometric-TransformerConv", EDGES, NODES, nodes),
    row("torch_geometric-GatedGraphConv", EDGES, NODES, graphs),
    row("torch_geometric-GCN with pooling", EDGES, NODES, graphs),
    row("torch-LSTM tagger", "batch, length", ((3, 6), (5, 9), (2, 4), (7, 97), (1, 30)), tagged, 3, ONE),
    row("torch-GRU tagger", "batch, length", ((3, 6), (5, 9), (2, 4), (7, 23), (4, 13)), tagged),
    row(
        "torch-nn.Transformer",
        "batch, two lengths",
        ((2, 5, 6), (3, 7, 4), (5, 11, 3), (4, 97, 31), (2, 6, 6)),
        translations,
    ),
    row("torch-MLP-Mixer", "batch", ((4,), (7,), (1,), (97,), (2,)), pictures, 3, ONE),
    row("torch-U-Net", "sides", ((2, 8, 8), (2, 16, 12), (2, 4, 10), (2, 34, 26), (2, 6, 8)), cells),
    row("torch-PINN", "batch", ((16,), (5,), (97,), (2,), (31,)), points),
    row("torch-coupling flow", "batch", ((8,), (5,), (97,), (2,), (31,)), vectors),
    row("torch-critic with penalty", "batch", ((8,), (5,), (97,), (1,), (31,)), vectors),
]
MODELS = [*TRANSFORMERS, *OTHERS]

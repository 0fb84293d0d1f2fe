"""Rows with images: JSON lines with paths, Parquet in the layout of geo3k, places in the text, pixels."""

import base64
import io
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from draw_geometry import main as draw_geometry
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from offbeat_core import DataError, ModelError
from offbeat_data import (
    ConversationConfig,
    DataConfig,
    Picture,
    RewardConfig,
    build_reward,
    load_conversations,
    load_image_rules,
    load_prompts,
    load_ratings,
    load_tokenizer,
)
from offbeat_data._image_rules import Gemma4ImageRules

SQUARE = 8  # pixels of a token, high and wide: see `vision_folder`


@pytest.fixture(scope="session")
def tokenizer(vision_folder):
    return load_tokenizer(vision_folder)


@pytest.fixture(scope="session")
def rules(vision_folder):
    return load_image_rules(vision_folder)


def picture(seed, height=24, width=32, form="PNG"):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), format=form)
    return buffer.getvalue()


def decoded(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def load(tokenizer, path, **settings):
    return load_prompts(DataConfig(path=str(path), **settings), tokenizer).train


def test_what_draw_geometry_writes_is_loaded_unchanged(tokenizer, tmp_path):
    draw_geometry([str(tmp_path), "--train", "12", "--test", "6", "--size-px", "64"])
    config = DataConfig(path=str(tmp_path), prompt_column="problem", eval_split="test")
    prompts = load_prompts(config, tokenizer)
    assert (len(prompts.train), len(prompts.eval)) == (12, 6)  # one question of many figures is not one question
    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    for prompt, row in zip(prompts.train, rows, strict=True):
        question = row["problem"].removeprefix("<image>")
        seen = "<|vision_start|>" + "<|image_pad|>" * 64 + "<|vision_end|>"
        wanted = f"<|im_start|>user\n{seen}{question}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(prompt.ids, skip_special_tokens=False) == wanted
        assert prompt.text == wanted.replace("<|image_pad|>" * 64, "<|image_pad|>")
        np.testing.assert_array_equal(prompt.images[0], decoded(row["images"][0]["bytes"]))
        assert prompt.answer == row["answer"]
        assert json.loads(json.dumps(prompt.fields)) == prompt.fields
    reward = build_reward(RewardConfig(name="math_verify"))
    right = [reward.score(each, rf"So it is \boxed{{{each.answer}}}.").value for each in prompts.eval]
    assert right == [1.0] * 6


@pytest.mark.parametrize(("flat", "kind"), [(True, "png"), (False, "jpeg")])
def test_a_preview_is_small_and_stands_in_a_page(flat, kind):
    """A drawing is smaller as PNG, a photograph as JPEG."""
    pixels = np.random.default_rng(0).integers(0, 256, (400, 600, 3), np.uint8)
    Image.fromarray(pixels * 0 if flat else pixels).save(file := io.BytesIO(), format="PNG")
    head, _, body = Picture(data=file.getvalue(), height=400, width=600).preview().partition(",")
    assert head == f"data:image/{kind};base64"
    shown = Image.open(io.BytesIO(base64.b64decode(body)))
    assert shown.size == (256, 171)
    assert len(body) < 64_000


def test_json_lines_name_files_beside_them(tokenizer, tmp_path, write_jsonl):
    (tmp_path / "figures").mkdir()
    for number, form in enumerate(("PNG", "JPEG")):
        (tmp_path / "figures" / f"{number}").write_bytes(picture(number, form=form))
    both = ["figures/0", str(tmp_path / "figures" / "1")]
    rows = [
        {"prompt": "Before <image> between <image> after.", "answer": "1", "images": both},
        {"prompt": "No picture, and <image> is a word.", "answer": "2"},
        {"prompt": "No place is named.", "answer": "3", "images": "figures/1"},
    ]
    first, second, third = load(tokenizer, write_jsonl(rows))
    assert "user\nBefore <|vision_start|><|image_pad|><|vision_end|> between <|vision" in first.text
    assert [image.shape for image in first.images] == [(24, 32, 3)] * 2
    np.testing.assert_array_equal(first.images[1], decoded((tmp_path / "figures" / "1").read_bytes()))
    assert second.images == ()
    assert "<image> is a word" in second.text
    assert "user\n<|vision_start|><|image_pad|><|vision_end|>No place" in third.text


def test_chat_messages_have_their_images_in_parts_or_marks(tokenizer, tmp_path):
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "text": None}]
    rows = [
        {
            "prompt": [{"role": "user", "content": parts}],
            "answer": "1",
            "images": [{"bytes": picture(0), "path": None}],
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "parts.parquet")
    [prompt] = load(tokenizer, tmp_path / "parts.parquet")
    assert "user\nLook: <|vision_start|><|image_pad|><|vision_end|><|im_end|>" in prompt.text


def test_one_text_of_two_pictures_is_two_questions(tokenizer, tmp_path):
    def rows(*seeds):
        made = [
            {"prompt": "Find x.", "answer": "1", "images": [{"bytes": picture(seed), "path": None}]} for seed in seeds
        ]
        return pa.Table.from_pylist(made)

    pq.write_table(rows(0, 1, 2), tmp_path / "train.parquet")
    pq.write_table(rows(2, 3), tmp_path / "test.parquet")
    prompts = load_prompts(DataConfig(path=str(tmp_path), eval_split="test"), tokenizer)
    assert (len(prompts.train), len(prompts.eval), prompts.train_counts.held_out) == (2, 2, 1)


def test_one_text_of_two_pictures_is_two_prompts_of_ratings(tokenizer, tmp_path, write_jsonl):
    """And two answers about one picture have one prompt: neither is compared with the other."""
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    rows = [
        {"prompt": "Find x.", "completion": said, "label": True, "images": [f"{number}.png"]}
        for number, said in ((0, "a"), (0, "b"), (1, "c"))
    ]
    ratings = load_ratings(ConversationConfig(path=write_jsonl(rows)), tokenizer).train
    others = [tokenizer.decode(each.mismatched.ids[each.mismatched.loss_mask]) for each in ratings]
    assert others == ["c", "c", "b"]
    for rating in ratings:
        np.testing.assert_array_equal(rating.mismatched.images, rating.answer.images)


def test_a_picture_is_brought_to_the_size_the_model_sees(tokenizer, rules, tmp_path):
    sizes = [(24, 32), (33, 70), (5, 9), (300, 400), (8, 160)]
    rows = [
        {"prompt": f"{size}", "answer": "1", "images": [{"bytes": picture(1, *size), "path": None}]} for size in sizes
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for prompt, size in zip(load(tokenizer, tmp_path / "rows.parquet"), sizes, strict=True):
        height, width = prompt.images[0].shape[:2]
        assert (height, width) == rules.fit(*size)
        assert rules.fit(height, width) == (height, width), "an engine would resize it again"
        assert np.count_nonzero(prompt.ids == rules.token_id) == height * width // SQUARE**2
        assert 4 <= height * width // SQUARE**2 <= 64


@pytest.mark.nightly
def test_sizes_are_those_of_transformers(rules):
    code = (
        "import json, sys\n"
        "from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize\n"
        "limits = {'factor': 8, 'min_pixels': 256, 'max_pixels': 4096}\n"
        "print(json.dumps([smart_resize(*size, **limits) for size in json.load(sys.stdin)]))"
    )
    draw = np.random.default_rng(0)
    sizes = [
        (int(high), int(wide))
        for high, wide in draw.integers(1, 400, (300, 2))
        if max(high, wide) < 200 * min(high, wide)
    ]
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(sizes), capture_output=True, text=True, timeout=90, check=True
    )
    assert [list(rules.fit(*size)) for size in sizes] == json.loads(done.stdout)


def test_a_camera_held_upright_is_turned(tokenizer, tmp_path, write_jsonl):
    image = Image.open(io.BytesIO(picture(0, 16, 48)))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.png", exif=exif)
    [prompt] = load(tokenizer, write_jsonl([{"prompt": "x", "answer": "1", "images": ["turned.png"]}]))
    np.testing.assert_array_equal(prompt.images[0], np.rot90(np.asarray(image), -1))


BROKEN = {
    "no such file": ("x", ["gone.png"], r"row 1: image 1: image .*gone\.png cannot be read"),
    "no image": ("x", ["words.txt"], r"row 1: image 1: .* no image that Pillow reads"),
    "a number": ("x", [3], r"an image must be a path, bytes"),
    "more places": ("<image> <image>", ["fine.png"], r"2 places for images \(<image>\), and the row 1 images"),
    "fewer places": ("<image>", ["fine.png", "fine.png"], r"1 places for images .*, and the row 2"),
    "a place without an image": ("<image>", [], r"1 places for images .*, and the row 0"),
    "a placeholder in the text": (
        "<|image_pad|>",
        ["fine.png"],
        r"hold placeholders .*leave placeholders out",
    ),
    "too thin": ("x", ["thin.png"], r"one side may be 200 times the other"),
}


@pytest.mark.parametrize(("prompt", "images", "message"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_named_by_row(prompt, images, message, tokenizer, tmp_path, write_jsonl):
    (tmp_path / "words.txt").write_text("no picture")
    (tmp_path / "fine.png").write_bytes(picture(0))
    (tmp_path / "thin.png").write_bytes(picture(0, 2, 500))
    with pytest.raises(DataError, match=message):
        load(tokenizer, write_jsonl([{"prompt": prompt, "answer": "1", "images": images}]))


@pytest.mark.parametrize("kind", ["image", "image_url"])
@pytest.mark.parametrize("template", ["vision", "tools"])
def test_a_place_for_an_image_that_is_not_there_is_no_placeholder(
    kind, template, tokenizer, make_tokenizer, write_jsonl
):
    asked = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "How long is it?"}]}]
    path = write_jsonl([{"prompt": asked, "answer": "1"}])
    with pytest.raises(DataError, match=r"row 1: the prompt has 1 places for images \(<image>\), and the row 0"):
        load(tokenizer if template == "vision" else make_tokenizer(template), path)


def test_a_file_that_is_broken_further_in_is_named(tokenizer, tmp_path, write_jsonl):
    for form in ("PNG", "JPEG"):
        (tmp_path / form).write_bytes(picture(0, 48, 48, form)[:900])
    with pytest.raises(DataError, match="row 1: image 1: an image of 900 bytes is broken"):
        load(tokenizer, write_jsonl([{"prompt": "x", "answer": "1", "images": ["PNG"]}]))
    [prompt] = load(tokenizer, write_jsonl([{"prompt": "x", "answer": "1", "images": ["JPEG"]}]))
    with pytest.raises(DataError, match="an image of 900 bytes is broken"):
        _ = prompt.images


def test_a_model_without_images_and_a_prompt_without_template_are_named(
    make_tokenizer, tokenizer, tmp_path, write_jsonl
):
    (tmp_path / "fine.png").write_bytes(picture(0))
    path = write_jsonl([{"prompt": "x", "answer": "1", "images": ["fine.png"]}])
    with pytest.raises(ModelError, match="takes no images"):
        load(make_tokenizer("chatml"), path)
    with pytest.raises(DataError, match="images need a chat template"):
        load(tokenizer, path, chat_template="off")


@pytest.mark.parametrize("writing", ["older", "newer", "within"])
def test_each_way_of_writing_the_limits_is_read(writing, tmp_path, rules):
    base = {"patch_size": 4, "merge_size": 2}
    sized = {**base, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    files = {
        "older": {"preprocessor_config.json": {**base, "min_pixels": 256, "max_pixels": 4096}},
        "newer": {"preprocessor_config.json": sized},
        "within": {"processor_config.json": {"image_processor": sized}},
    }[writing]
    for name, content in {"config.json": {"image_token_id": rules.token_id}, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert load_image_rules(tmp_path) == rules


def test_a_model_whose_images_are_cut_otherwise_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 5}))
    with pytest.raises(ModelError, match=r"preprocessor_config\.json.*must give patch_size"):
        load_image_rules(tmp_path)


GEMMA = {
    "gemma3": (
        {"image_token_index": "soft", "boi_token_index": "boi", "eoi_token_index": "eoi", "mm_tokens_per_image": 4},
        {"vision_config": {"image_size": 16}},
        "<boi>",
        "\n\n<boi>{}<eoi>\n\n",
    ),
    "gemma4": (
        {"image_token_id": "soft", "boi_token_id": "boi", "eoi_token_id": "eoi"},
        {},
        "<soft>",
        "<boi>{}<eoi>",
    ),
}


@pytest.fixture(params=GEMMA)
def gemma(request, vision_folder, tmp_path):
    """Family, tokenizer, and text of an image whose placeholders are left open."""
    ids, more, mark, written = GEMMA[request.param]
    backend = Tokenizer.from_file(str(vision_folder / "tokenizer.json"))
    backend.add_special_tokens(["<boi>", "<eoi>", "<soft>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {key: backend.token_to_id(f"<{name}>") if isinstance(name, str) else name for key, name in ids.items()}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": request.param, **named, **more}))
    settings = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    template = (vision_folder / "chat_template.jinja").read_text()
    (tmp_path / "chat_template.jinja").write_text(template.replace("<|vision_start|><|image_pad|><|vision_end|>", mark))
    (tmp_path / "tokenizer_config.json").write_text((vision_folder / "tokenizer_config.json").read_text())
    return request.param, load_tokenizer(tmp_path), written


def test_images_of_gemma_are_written_as_its_processor_writes_them(gemma, tmp_path, write_jsonl):
    """Between marks, which chat templates of Gemma 3 write alone, and as many tokens as their size asks for."""
    family, tokenizer, written = gemma
    (tmp_path / "figure").write_bytes(picture(0, 24, 32))
    path = write_jsonl([{"prompt": "Before <image>after.", "answer": "1", "images": ["figure"]}])
    [prompt] = load(tokenizer, path)
    size = {"gemma3": (16, 16), "gemma4": (56, 72)}[family]
    image = written.format("<soft>" * (size[0] * size[1] // 64))
    assert f"user\nBefore {image}after." in tokenizer.decode(prompt.ids, skip_special_tokens=False)
    assert prompt.images[0].shape == (*size, 3)


@given(height=st.integers(1, 3000), width=st.integers(1, 3000))
def test_images_of_gemma4_have_a_size_that_its_processor_leaves_alone(height, width):
    rules = Gemma4ImageRules(token_id=1, square=48, begin_id=2, end_id=3, max_tokens=280)
    size = rules.fit(height, width)
    assert get_aspect_ratio_preserving_size(*size, 16, 280 * 9, 3) == size
    assert 1 <= rules.num_tokens(*size) <= 280
    once = get_aspect_ratio_preserving_size(height, width, 16, 280 * 9, 3)
    assert size[0] >= once[0]
    assert size[1] >= once[1]


def test_conversations_with_images_mask_the_answers_alone(tokenizer, rules, tmp_path, write_jsonl):
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(picture(number, 24 + 8 * number, 32))
    talk = [
        {"role": "user", "content": "<image>What is it?"},
        {"role": "assistant", "content": "Noise."},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "Noise too."},
    ]
    exchange = {"prompt": "<image>What?", "completion": "Noise.", "images": ["1.png"]}
    path = write_jsonl([{"messages": talk, "images": ["0.png", "1.png"]}, exchange])
    first, second = load_conversations(ConversationConfig(path=path), tokenizer).train
    assert [image.shape for image in first.images] == [(24, 32, 3), (32, 32, 3)]
    assert np.count_nonzero(first.ids == rules.token_id) == 12 + 16
    assert (
        tokenizer.decode(first.ids[first.loss_mask], skip_special_tokens=False)
        == "Noise.<|im_end|>Noise too.<|im_end|>"
    )
    assert tokenizer.decode(second.ids[second.loss_mask], skip_special_tokens=False) == "Noise.<|im_end|>"
    assert np.count_nonzero(second.ids == rules.token_id) == 16
    cut = ConversationConfig(path=path, max_sequence_tokens=60, too_long="truncate")
    assert load_conversations(cut, tokenizer).train_counts.too_long == 1


SIZE_PX = 16
LINE = slice(4, 8)


def pixels_of(image, **options):
    image.save(file := io.BytesIO(), format="PNG", **options)
    return Picture(data=file.getvalue(), height=image.height, width=image.width).pixels()


def drawing(mode, line_alpha):
    """Pixels of a black line on an invisible ground of black: colours, then alpha."""
    made = np.zeros((SIZE_PX, SIZE_PX, len(mode)), np.uint8)
    made[LINE, :, -1] = line_alpha
    return made


def with_palette():
    image = Image.new("P", (SIZE_PX, SIZE_PX), 0)
    image.putpalette([0, 0, 0, 0, 0, 0])  # black twice: the ground, which is transparent, and the line
    image.paste(1, (0, LINE.start, SIZE_PX, LINE.stop))
    return image, {"transparency": 0}


def of_one_colour_left_out():
    """A PNG without alpha in which one colour counts as transparent. Source: PNG, third edition, tRNS."""
    made = np.full((SIZE_PX, SIZE_PX, 3), 7, np.uint8)
    made[LINE] = 0
    return Image.fromarray(made), {"transparency": (7, 7, 7)}


DRAWN = {
    "RGBA": lambda: (Image.fromarray(drawing("RGBA", 255)), {}),
    "LA": lambda: (Image.fromarray(drawing("LA", 255), mode="LA"), {}),
    "P": with_palette,
    "RGB": of_one_colour_left_out,
}


@pytest.mark.parametrize("mode", DRAWN)
def test_black_lines_on_a_transparent_ground_are_seen_on_white(mode):
    image, options = DRAWN[mode]()
    assert image.mode == mode
    pixels = pixels_of(image, **options)
    wanted = np.full((SIZE_PX, SIZE_PX, 3), 255, np.uint8)
    wanted[LINE] = 0
    np.testing.assert_array_equal(pixels, wanted)


def test_what_is_half_transparent_is_half_white():
    pixels = pixels_of(Image.fromarray(drawing("RGBA", 51)))  # a fifth of black
    assert np.unique(pixels[LINE]).tolist() == [204]


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "RGBA", "CMYK"])
def test_what_is_opaque_is_as_it_was(mode):
    drawn = np.random.default_rng(0).integers(0, 256, (SIZE_PX, SIZE_PX, 3), np.uint8)
    image = Image.fromarray(drawn).convert(mode)
    image.save(file := io.BytesIO(), format="JPEG" if mode == "CMYK" else "PNG")
    image = Image.open(io.BytesIO(file.getvalue())) if mode == "CMYK" else image
    pixels = Picture(data=file.getvalue(), height=SIZE_PX, width=SIZE_PX).pixels()
    np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")))

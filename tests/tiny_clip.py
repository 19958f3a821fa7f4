"""Tiny stand-ins that tests share: an open_clip folder, pictures in an archive, records with negatives."""
import io, logging, zipfile
from pathlib import Path
import torch
from PIL import Image
from cs_clip.data import Foil, Record, Records, Unit, UnitFoil
from cs_clip.models import SIGLIP_PICTURES, new_model, tiny_clip_config, tiny_siglip_config, word_tokenizer
from transformers import (AutoTokenizer, Blip2Config, Blip2ForImageTextRetrieval, BlipImageProcessor, CLIPConfig, CLIPImageProcessor, CLIPModel,
                          SiglipConfig, SiglipImageProcessor, SiglipModel)

COLORS, THINGS = ('red', 'blue', 'lime', 'gold', 'gray', 'pink'), ('mug', 'cat', 'dog', 'cup')


def captions():
    return [f'a {color} {thing} next to a {other}' for color in COLORS for thing in THINGS for other in THINGS if thing != other]


def clip_config(vision='resnet', **text):
    "A model of a few thousand weights; `vision='vit'` has no batch statistics."
    cfg = tiny_clip_config(vocab_size=64, width=8, image_size=32, embed_dim=32, text_width=32, text_heads=2, text_layers=2, context_length=16)
    if vision == 'vit': cfg['vision_cfg'] = {'image_size': 32, 'layers': 1, 'width': 32, 'head_width': 16, 'patch_size': 16}
    cfg['text_cfg'].update(text)
    return cfg


def tiny_clip(folder, vision='resnet', seed=0):
    "An untrained model saved as an open_clip folder; its name for `load`."
    folder = Path(folder)
    word_tokenizer(captions(), folder/'tokenizer', 16)
    logging.disable(logging.WARNING)  # open_clip warns that the weights are random
    torch.manual_seed(seed)
    new_model(clip_config(vision), folder/'tokenizer').save(folder/'clip')
    logging.disable(logging.NOTSET)
    return f'local-dir:{folder/"clip"}'


def tiny_siglip(folder, seed=0):
    "An untrained open_clip SigLIP saved as a folder; its name for `load`. Its bias is no -10, so that pairs pull both ways from the first step."
    folder = Path(folder)
    logging.disable(logging.WARNING)
    torch.manual_seed(seed)
    model = new_model(tiny_siglip_config(64, 16, 1) | {'init_logit_bias': -1.}, word_tokenizer(captions(), folder/'tokenizer', 16), SIGLIP_PICTURES)
    model.save(folder/'siglip')
    logging.disable(logging.NOTSET)
    return f'local-dir:{folder/"siglip"}'


def tiny_transformers(folder, kind='clip', seed=0, **text):
    "An untrained CLIP, SigLIP or BLIP-2 saved as transformers' folder; its name for `load`."
    folder = Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(word_tokenizer(captions(), folder/'tokenizer', 16))
    vision = dict(hidden_size=32, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16)
    text = dict(vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16,
                bos_token_id=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=0) | text
    torch.manual_seed(seed)
    if kind == 'clip':
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
        images = CLIPImageProcessor(size={'shortest_edge': 32}, crop_size={'height': 32, 'width': 32})
    elif kind == 'siglip':
        model, images = SiglipModel(SiglipConfig(text_config=text, vision_config=vision)), SiglipImageProcessor(size={'height': 32, 'width': 32})
    else:
        model = Blip2ForImageTextRetrieval(Blip2Config(
            vision_config=vision, qformer_config={**text, 'use_qformer_text_input': True}, num_query_tokens=4, image_text_hidden_size=16))
        torch.nn.init.normal_(model.query_tokens)  # zeros, untrained: all queries would see the same
        images = BlipImageProcessor(size={'height': 32, 'width': 32})
    with torch.no_grad():
        for x in model.parameters(): x += .05*torch.randn_like(x)  # BLIP-2 starts with weights of 1e-10
    for part in model, tokenizer, images: part.save_pretrained(folder/kind)
    return f'local-dir:{folder/kind}'


def png(color, size=(32, 32)):
    out = io.BytesIO()
    Image.new('RGB', size, color).save(out, 'png')
    return out.getvalue()


def tiny_records(n=12):
    """Records of two captions each, the first with two negatives, the second with one; every third lacks shuffled captions. The second caption
    has no relation. Each has two concepts."""
    def entity(text, *foils): return Unit('entity', text, tuple(UnitFoil('object', f, f'a {f}') for f in foils))
    records = []
    for i in range(n):
        color, other, thing = COLORS[i % 6], COLORS[(i + 1) % 6], THINGS[i % 3]
        records.append(Record(
            f'train/{i}.png', (f'a {color} {thing} next to a cup', f'a {thing} next to a {color} cup'), (2*i, 2*i + 1),
            ((Foil('replace_att', f'a {other} {thing} next to a cup'), Foil('replace_rel', f'a {color} {thing} on a cup')),
             (Foil('swap_obj', f'a cup next to a {color} {thing}'),)),
            (None, None) if i % 3 == 0 else (f'a {color} mug next to a {thing}', f'a cup next to a {color} {thing}'),
            ((entity(f'{color} {thing}', f'{other} {thing}'), entity('cup', 'tree'), Unit('relation', f'{color} {thing} next to cup', (
                UnitFoil('predicate', f'{color} {thing} on cup', f'a {color} {thing} on a cup'),), (0, 1))),
             (entity(thing), entity(f'{color} cup', f'{other} cup'))),
            ((f'{color} {thing}', 'cup'), (thing, f'{color} cup'))))
    return Records(records)


def tiny_images(folder, n=12):
    "`folder`/train.zip with the pictures of `tiny_records`."
    Path(folder).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(Path(folder)/'train.zip', 'w') as z:
        for i in range(n): z.writestr(f'train/{i}.png', png(COLORS[i % 6], (32 + i, 32)))
    return Path(folder)

"""Scoring SugarCrepe against its authors' protocol, one item at a time: the same model, items and verdicts, in one run.

    python benchmarks/evaluation.py                                         IconWorld's items, ViT-B/32 with random weights
    python benchmarks/evaluation.py --sugar-crepe data --images val2017     the real ones; all of them (hours for the authors' way)
    python benchmarks/evaluation.py --retrieval                             5,000 pictures x 25,000 captions: time and memory of the ranking

The authors' evaluate.py opens an item's picture, encodes it, then its caption, then its negative, each 77 tokens long. SugarCrepe has 4.8 items a
picture and IconWorld 2.0, and who encodes a picture once gains by that; so of IconWorld the pictures with five items are taken. Processor seconds
stand beside those of the clock, which count whatever else the machine does."""
import argparse, json, resource, tempfile, time, zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import open_clip, torch
from PIL import Image

from cs_clip.benchmarks import retrieval, sugar_crepe
from cs_clip.data import ImageStore
from cs_clip.evaluation import Embedder, evaluate
from cs_clip.files import project_root
from cs_clip.models import DualEncoder


def vit_b_32():
    "The paper's architecture, its weights drawn at random."
    torch.manual_seed(0)
    return DualEncoder(open_clip.create_model('ViT-B-32-quickgelu').eval(), open_clip.get_model_config('ViT-B-32-quickgelu'),
                       open_clip.get_tokenizer('ViT-B-32-quickgelu'))


@torch.inference_mode()
def one_item_at_a_time(model, store, choices):
    "SugarCrepe's protocol, through open_clip's own encoders: 1 for right, 0 for wrong, = for a tie."
    said = []
    for c in choices:
        picture = model.clip.encode_image(model.preprocess(store.open(c.image))[None], normalize=True)
        caption, negative = (model.clip.encode_text(model.tokenize([t]), normalize=True) for t in c.texts)
        right, wrong = (picture @ caption.T).item(), (picture @ negative.T).item()
        said.append('1' if right > wrong else '=' if right == wrong else '0')
    return ''.join(said)


def with_items(benchmark, n):
    "The part of a benchmark on pictures that have `n` items."
    count = Counter(c.image for c in benchmark.choices)
    choices = [c for c in benchmark.choices if count[c.image] == n]
    return replace(benchmark, choices=choices, expected=dict(Counter(c.subset for c in choices)))


def timed(work):
    "Seconds of the clock, of the processor, and what `work` gives."
    clock, processor = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - clock, time.process_time() - processor, result


class Noise:
    "An encoder that costs nothing: what is left is the ranking."
    preprocess_cfg, digest = {}, 'noise'
    def eval(self): return self
    def preprocess(self, picture): return torch.zeros(3, 1, 1)
    def tokenize(self, texts): return torch.tensor([[int(w) + 1 for w in t.split()] for t in texts])
    def encode_image(self, pixels): return torch.nn.functional.normalize(torch.randn(len(pixels), 512), dim=-1)
    def encode_text(self, tokens): return torch.nn.functional.normalize(torch.randn(len(tokens), 512), dim=-1)


def measure_retrieval(pictures=5_000, captions=5):
    "Seconds and peak memory of evaluating retrieval with embeddings that cost nothing."
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        Image.new('RGB', (8, 8)).save(folder/'one.png')
        data, images = (folder/'one.png').read_bytes(), []
        with zipfile.ZipFile(folder/'test.zip', 'w') as z:
            for i in range(pictures):
                z.writestr(f'test/{i}.png', data)
                images.append({'filepath': 'test', 'filename': f'{i}.png', 'split': 'test',
                               'sentences': [{'raw': f'{i} {k}', 'sentid': i*captions + k} for k in range(captions)]})
        (folder/'dataset.json').write_text(json.dumps({'images': images}))
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20
        seconds, _, result = timed(lambda: evaluate(Noise(), retrieval(folder/'dataset.json', 'test', folder)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss/2**20
    n = {k: s['n'] for k, s in result['subsets'].items()}
    print(f'retrieval     {n["i2t"]} pictures x {n["t2i"]} captions: {seconds:.1f} s, peak {peak:.2f} GiB of which {start:.2f} before it began')


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--sugar-crepe', type=Path)
    parser.add_argument('--images', type=Path)
    parser.add_argument('--retrieval', action='store_true')
    a = parser.parse_args()
    if a.retrieval: return measure_retrieval()
    world = project_root()/'data/icon_world'
    benchmark = sugar_crepe(a.sugar_crepe or world/'sugar_crepe', a.images or world/'test.zip')
    store = ImageStore(benchmark.images)
    there = [c for c in benchmark.choices if c.image in store]
    if not there: parser.error(f'{benchmark.images}: none of the pictures is there')
    benchmark = replace(benchmark, choices=there, expected=dict(Counter(c.subset for c in there)))
    if not a.sugar_crepe: benchmark = with_items(benchmark, 5)
    choices, model = benchmark.choices, vit_b_32()
    one_item_at_a_time(model, store, choices[:2])
    pictures, texts = len({c.image for c in choices}), len({t for c in choices for t in c.texts})
    print(f'{len(choices)} items, {pictures} pictures ({len(choices)/pictures:.1f} items each), {texts} distinct texts; ViT-B/32, '
          f'{torch.get_num_threads()} threads')
    clock, processor, result = timed(lambda: evaluate(Embedder(model, 64), benchmark))
    print(f'cs_clip       {clock:8.1f} s  {processor:8.1f} processor s')
    theirs, theirs_processor, said = timed(lambda: one_item_at_a_time(model, store, choices))
    same = sum(x == y for x, y in zip(''.join(result['verdicts']['i2t']), said, strict=True))
    print(f'one item      {theirs:8.1f} s  {theirs_processor:8.1f} processor s')
    print(f'ratio         {theirs/clock:8.1f}    {theirs_processor/processor:8.1f}              same verdict on {same} of {len(said)}')


if __name__ == '__main__': main()

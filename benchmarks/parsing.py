"""The parser against `sng_parser`, the published scene graph parser: the same captions and the same spaCy model, in one run.

    pip install SceneGraphParser                         what it is compared with; the project itself does not need it
    python benchmarks/parsing.py                         the embedded world's captions
    python benchmarks/parsing.py captions.txt            a text file's, one a line

Both read in turns, a part of the captions at a time, so that what else the machine does slows them alike; loading the model is not counted."""
import argparse, sys, time
from itertools import islice
from pathlib import Path

from cs_clip.data import read_karpathy
from cs_clip.files import project_root
from cs_clip.parsing import MODELS, SceneGraphParser, spacy

MISSING = 'sng_parser is not installed: pip install SceneGraphParser (spaCy and its model are the ones that this project already needs)'


def read_captions(path, n):
    "The first `n` captions of a text file or, without one, of the embedded world."
    if path: return list(islice(filter(None, map(str.strip, Path(path).read_text(encoding='utf-8').splitlines())), n))
    records = read_karpathy(project_root()/'data/icon_world/dataset_coco.json', 'train')
    return list(islice((caption for record in records for caption in record.captions), n))


def main(path, n, parts):
    try: from sng_parser.parser import Parser
    except ImportError: sys.exit(MISSING)
    captions = read_captions(path, n)
    if not captions: sys.exit(f'{path}: no captions')
    ours, theirs = SceneGraphParser(), Parser('spacy', model=next(m for m in MODELS if spacy.util.is_package(m)))
    ways = {'cs_clip': lambda part: list(ours.parse(part)), 'sng_parser': lambda part: [theirs.parse(caption) for caption in part]}
    for way in ways.values(): way(captions[:8])  # the first calls fill caches
    seconds, size = dict.fromkeys(ways, 0.), -(-len(captions)//parts)
    for start in range(0, len(captions), size):
        for name, way in ways.items():
            begun = time.perf_counter()
            way(captions[start:start + size])
            seconds[name] += time.perf_counter() - begun
    print(f'{len(captions)} captions, of {sum(len(c.split()) for c in captions)/len(captions):.1f} words each')
    for name, spent in seconds.items(): print(f'{name:12}{len(captions)/spent:8.0f} captions/s')
    print(f'{"ratio":12}{seconds["sng_parser"]/seconds["cs_clip"]:8.1f}')


if __name__ == '__main__':
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument('path', nargs='?', help='a text file, a caption a line; without it, the embedded world\'s captions')
    args.add_argument('--captions', type=int, default=2_000, help='at most so many')
    args.add_argument('--parts', type=int, default=4, help='how many times the two take turns')
    args = args.parse_args()
    main(args.path, args.captions, args.parts)

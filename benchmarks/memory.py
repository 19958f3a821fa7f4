"""Peak memory of parsing captions and generating their negatives, at several sizes, each in a process of its own, and what a straight line through
them says of a million: the growth beyond what is loaded, so that a process whose memory is constant shows its noise, no more. Captions are
IconWorld's, drawn one after the other and streamed through Parquet.

    python benchmarks/memory.py [SIZE ...] [--shard-size N] [--mlm FOLDER] [--nli FOLDER]
"""
import argparse, json, subprocess, sys, tempfile

MILLION = 1_000_000

def write_captions(path, n, seed=0):
    "`n` captions of scenes of the training split, streamed to Parquet."
    import numpy as np, pyarrow as pa, pyarrow.parquet as pq
    from cs_clip.icon_world import Style, describe, say, scene_at
    schema = pa.schema({'sentid': pa.int64(), 'image': pa.string(), 'caption': pa.string()})
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, n, 1000):
            rows = []
            for i in range(start, min(n, start + 1000)):
                rng = np.random.default_rng([seed, i])
                rows.append({'sentid': i, 'image': f'train/{i}.png', 'caption': say(describe(scene_at(seed, 'train', i), rng), Style(rng))})
            writer.write_table(pa.Table.from_pylist(rows, schema))

def measure(captions, out, mlm, nli, shard_size):
    "Peak resident memory in MB once everything is loaded, after parsing and after generating."
    import resource
    from cs_clip.data import CaptionRows
    from cs_clip.generation import generate_file, hard_negatives
    from cs_clip.parsing import load_spacy, parse_file
    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == 'darwin' else 2**10)
    engine, _ = hard_negatives(mlm, nli), load_spacy()
    peaks = {'loaded': peak()}
    parse_file(CaptionRows(captions), f'{out}/graphs', shard_size=shard_size)
    peaks['parsed'] = peak()
    generate_file(f'{out}/graphs', out, engine)
    return {**peaks, 'generated': peak()}

def in_own_process(function, *args):
    "A process's peak never falls, and a child begins with its parent's: this one imports nothing large."
    code = f'import json, runpy; print(json.dumps(runpy.run_path({__file__!r})[{function!r}](*json.loads({json.dumps(json.dumps(args))}))))'
    return json.loads(subprocess.run([sys.executable, '-c', code], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])

def line_at(x, points):
    "The least-squares line's value at `x`."
    n, xs, ys = len(points), *map(sum, zip(*points))
    slope = sum((a - xs/n)*(b - ys/n) for a, b in points)/sum((a - xs/n)**2 for a, _ in points)
    return ys/n + slope*(x - xs/n)

def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('sizes', nargs='*', type=int, default=[2000, 4000, 8000], help='captions; at least two sizes')
    parser.add_argument('--shard-size', type=int, default=1000, help='captions in a shard: far below the sizes, or a shard is what is measured')
    parser.add_argument('--mlm', default='data/models/mlm')
    parser.add_argument('--nli', default='data/models/nli')
    a = parser.parse_args()
    if len(set(a.sizes)) < 2: parser.error('a line needs at least two sizes')
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in sorted(set(a.sizes)):
            in_own_process('write_captions', f'{folder}/{n}.parquet', n)
            rows.append((n, in_own_process('measure', f'{folder}/{n}.parquet', f'{folder}/{n}', a.mlm, a.nli, a.shard_size)))
    columns = list(rows[0][1])
    print(f'peak resident memory in MB, shards of {a.shard_size:,} captions\n')
    print(f'{"captions":>12}' + ''.join(f'{c:>11}' for c in columns))
    for n, peaks in rows: print(f'{n:12,}' + ''.join(f'{peaks[c]:11,.0f}' for c in columns))
    loaded = sum(peaks['loaded'] for _, peaks in rows)/len(rows)
    lines = {c: loaded + line_at(MILLION, [(n, peaks[c] - peaks['loaded']) for n, peaks in rows]) for c in columns}
    print(f'{MILLION:12,}' + ''.join(f'{lines[c]:11,.0f}' for c in columns) + '  by a straight line')

if __name__ == '__main__': main()

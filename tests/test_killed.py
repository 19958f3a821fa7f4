"A run that is killed at any moment, again and again, ends with the bytes of one that was not."
import json, os, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KILLS = 20

# One process imports and loads; each run is a fork of it, so that twenty starts cost no twenty imports. It is a process of its own, with one thread:
# a fork of pytest's would inherit locks of threads that it does not have.
DRIVER = '''
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from cs_clip.data import CaptionRows
from cs_clip.generation import generate_file, hard_negatives
from cs_clip.parsing import SceneGraphParser, parse_file

captions, mlm, nli, out, kills = *sys.argv[1:4], Path(sys.argv[4]), int(sys.argv[5])
engine = hard_negatives(mlm, nli, parser=SceneGraphParser(), k=4)
list(engine.generate(['a red car next to a small dog'])) # loads what is loaded at the first use

def start(folder):
    "A process that does the whole work."
    if pid := os.fork(): return pid
    try:
        parse_file(CaptionRows(captions), folder/'graphs', shard_size=10)
        generate_file(folder/'graphs', folder, engine)
        os._exit(0)
    except BaseException as e:
        print(repr(e), file=sys.stderr, flush=True)
        os._exit(1)

def content(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob('*') if p.is_file()}
def count(folder): return sum(1 for p in folder.rglob('*') if p.suffix in ('.parquet', '.json'))

def ended(pid, due=lambda: False):
    "Whether it came to its end before it was due to be killed."
    while not due():
        if (done := os.waitpid(pid, os.WNOHANG))[0]:
            assert done[1] == 0, done
            return True
        time.sleep(.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False

begin = time.monotonic()
assert ended(start(out/'whole'))
whole, rng, runs, left = content(out/'whole'), random.Random(0), 1, []
a_file = (time.monotonic() - begin)/len(whole)
while True:
    folder, seen = out/f'killed-{runs}', []
    enough, delay = count(folder) + rng.randrange(5), 2*a_file*rng.random() # two files more on the average: the moments lie all over the run
    def due():
        if not seen and count(folder) >= enough: seen.append(time.monotonic())
        return seen and time.monotonic() > seen[0] + delay
    if ended(start(folder), due) if len(left) < kills else ended(start(folder)):
        assert content(folder) == whole, f'run {runs} ended with other bytes, or left a part'
        if len(left) == kills: break
        runs += 1
    else:
        found = content(folder)
        assert {k: v for k, v in found.items() if not k.endswith(('unfinished', '.part'))}.items() <= whole.items(), f'after kill {len(left)}: a file of other bytes'
        left.append(count(folder))
print(json.dumps({'left': left, 'whole': len(whole)}))
'''

def test_a_run_killed_twenty_times_ends_with_the_same_bytes(tmp_path):
    if not (ROOT/'data/models/mlm').exists(): pytest.fail(f'{ROOT}/data: the embedded world is not here; fetch it with `make data`', pytrace=False)
    images = json.loads((ROOT/'data/icon_world/dataset_coco.json').read_text())['images']
    texts = [s['raw'] for i in images[:100] for s in i['sentences']][:200]
    (tmp_path/'captions.txt').write_text('\n'.join(texts))
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1', 'TOKENIZERS_PARALLELISM': 'false'}
    models = [ROOT/'data/models/mlm', ROOT/'data/models/nli']
    done = subprocess.run([sys.executable, '-c', DRIVER, tmp_path/'captions.txt', *models, tmp_path, str(KILLS)], env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said['whole'] == 41 and len(said['left']) == KILLS  # 20 shards of graphs, 20 of negatives, and the coverage
    assert min(said['left']) < 15 and max(said['left']) > 26, f'the kills came too early or too late: {said["left"]} files were there'

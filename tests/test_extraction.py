"Units from a language model: a real HTTP server that misbehaves; nothing invalid gets through, nothing valid is lost, nothing is asked twice."
import http.server
import json
import socket
import threading
import time
from collections import Counter

import pytest

from cs_clip import units as un
from cs_clip.cli import cs_clip_extract
from cs_clip.data import load_supervision
from cs_clip.extraction import MALFORMED, NO_ANSWER, NOT_SAID, STEPS, ChatServer, extract, extract_file, read_units
from cs_clip.files import CSClipError
from cs_clip.parsing import parse_file

COLOURS, THINGS = ('red', 'blue', 'green', 'black', 'white'), ('dog', 'cat', 'horse', 'cow', 'sheep')
CAPTIONS = [f'A {c} {a} above a {b}' for c in COLOURS for a in THINGS for b in THINGS if a != b][:40]

def perfect(step, user):
    "What a flawless model would answer."
    caption = user.splitlines()[0].removeprefix('Caption: ')
    _, colour, a, p, _, b = caption.split()
    first = f'{colour} {a}'
    other = next(c for c in COLOURS if c != colour)
    if step == 'units': return {'entities': [first, b], 'relations': [{'subject': first, 'predicate': p, 'object': b}]}
    if step == 'entity_foils':
        return {'foils': [{'unit': 0, 'change': 'attribute', 'text': f'{other} {a}'}, {'unit': 0, 'change': 'object', 'text': f'{colour} bus'},
                          {'unit': 1, 'change': 'object', 'text': 'bus'}]}
    return {'foils': [{'unit': 0, 'change': 'predicate', 'subject': first, 'predicate': 'below', 'object': b},
                      {'unit': 0, 'change': 'swap', 'subject': b, 'predicate': p, 'object': first},
                      {'unit': 0, 'change': 'entity', 'subject': f'{colour} bus', 'predicate': p, 'object': b}]}

def careless(step, user):
    "The same with much that is wrong beside it, in the right shape and in others."
    answer = perfect(step, user)
    if step == 'units':
        answer['entities'] = ['purple dinosaur', 7, '', None, *answer['entities'], answer['entities'][0], {'text': 'dog'}, 'above a']
        answer['relations'] += [{'subject': 'purple dinosaur', 'predicate': 'on', 'object': answer['entities'][5]}, {'subject': 'x'}, 'relation',
                                {**answer['relations'][0], 'confidence': .9}, {**answer['relations'][0], 'predicate': ''}]
    else:
        good = answer['foils']
        answer['foils'] = ['no', {'unit': 99, **{k: v for k, v in good[0].items() if k != 'unit'}}, {**good[0], 'change': 'colour'}, {**good[0], 'unit': True},
                           *({**f, 'why': 'because'} for f in good), good[0]]
        if step == 'entity_foils': answer['foils'] += [{**good[1], 'text': f'two {good[1]["text"]}s'}, {**good[2], 'text': user.splitlines()[2][3:] + 's'}]
        else: answer['foils'] += [{**good[0], 'subject': 'bus'}, {**good[0], 'predicate': 'over'}, {**good[1], 'object': good[1]['subject']}]
    answer['thoughts'] = 'Let me see.'
    return answer

def completion(content): return json.dumps({'choices': [{'message': {'content': content}}], 'usage': {'prompt_tokens': 100, 'completion_tokens': 10}}).encode()

class Model(http.server.ThreadingHTTPServer):
    "`behave(nth try of a question, step, user)` gives (status, headers, body), or does something to the handler itself and gives `None`."
    daemon_threads, request_queue_size = True, 128
    def __init__(self, behave):
        self.behave, self.asked, self.bodies, self.lock = behave, Counter(), [], threading.Lock()
        super().__init__(('127.0.0.1', 0), Handler)
        threading.Thread(target=self.serve_forever, args=(.02,), daemon=True).start()
    @property
    def url(self): return f'http://127.0.0.1:{self.server_port}/v1'
    def handle_error(self, *args): pass # clients that hang up are expected here

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers['content-length'])))
        step, user = body['response_format']['json_schema']['name'], body['messages'][1]['content']
        with self.server.lock:
            self.server.asked[step, user] += 1
            self.server.bodies.append((self.path, dict(self.headers), body))
            n = self.server.asked[step, user]
        if (reply := self.server.behave(self, n, step, user)) is None: return
        status, headers, content = reply
        self.send_response(status)
        for k, v in {'content-length': len(content), **headers}.items(): self.send_header(k, str(v))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *args): pass

def well(handler, n, step, user): return 200, {}, completion(json.dumps(perfect(step, user)))

def cut(handler):
    handler.send_response(200)
    handler.send_header('content-length', '1000')
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True

def badly(handler, n, step, user):
    "Two faults, another pair for each question, and then a careless answer."
    faults = [lambda: (429, {'retry-after': '0.01'}, b'busy'), lambda: (503, {}, b'<html>down</html>'), lambda: cut(handler), lambda: time.sleep(.6),
              lambda: (200, {}, completion(json.dumps(perfect(step, user))[:-9])), lambda: (200, {}, b'<html>proxy</html>'), lambda: (200, {}, b'{"choices": []}'),
              lambda: (200, {}, completion('["a list"]')), lambda: (200, {}, completion('Sure! Here is the JSON: {}')), lambda: (200, {}, completion(None))]
    if n > 2: return 200, {}, completion(json.dumps(careless(step, user)))
    return faults[(sum(user.encode()) + len(step) + n*3) % len(faults)]()

@pytest.fixture
def serve():
    servers = []
    def start(behave): servers.append(Model(behave)); return servers[-1]
    yield start
    for s in servers: s.shutdown(); s.server_close()

def client(server, **kw): return ChatServer(server.url, 'any', **{'wait': .01, 'timeout': .3, 'concurrency': 8, 'key': 'secret', **kw})

def parts(found): return [(u.text, u.foils) for u in found.entities + found.relations]


def test_one_caption(serve):
    found = extract(client(serve(well)), CAPTIONS[0])
    assert [(u.text, [(f.change, f.text, f.sentence) for f in u.foils]) for u in found.entities + found.relations] == [
        ('red dog', [('attribute', 'blue dog', 'A blue dog above a cat'), ('object', 'red bus', 'A red bus above a cat')]),
        ('cat', [('object', 'bus', 'A red dog above a bus')]),
        ('red dog above cat', [('predicate', 'red dog below cat', 'A red dog below a cat'), ('swap', 'cat above red dog', 'A cat above a red dog'),
                               ('entity', 'red bus above cat', 'A red bus above a cat')])]
    assert not found.skipped


def test_the_request_is_the_papers(serve):
    server = serve(well)
    extract(client(server), CAPTIONS[0])
    assert [b['response_format']['json_schema']['name'] for *_, b in server.bodies] == ['units', 'entity_foils', 'relation_foils']
    for path, headers, body in server.bodies:
        assert path == '/v1/chat/completions' and headers['Authorization'] == 'Bearer secret'
        assert (body['model'], body['temperature'], body['top_p'], body['chat_template_kwargs']) == ('any', .3, .95, {'enable_thinking': False})
        form = body['response_format']
        assert form['type'] == 'json_schema' and form['json_schema']['strict'] and form['json_schema']['schema']['additionalProperties'] is False
    assert 'chat_template_kwargs' not in ChatServer(server.url, 'any', extra={}).fields


def test_a_misbehaving_server_changes_nothing(serve, tmp_path):
    good, bad = serve(well), serve(badly)
    expected = [parts(extract(client(good), c)) for c in CAPTIONS]
    parse_file(((i, f'{i}.png', c) for i, c in enumerate(CAPTIONS)), tmp_path/'parse', shard_size=15)
    coverage = extract_file(tmp_path/'parse', tmp_path/'units', client(bad), prices=(1., 10.))
    rows = [r for p in sorted((tmp_path/'units').glob('*.parquet')) for r in un.read_shard(p, un.SCHEMA.names, 'units')]
    assert [[(u['text'], tuple(un.UnitFoil(**f) for f in u['foils'])) for u in r['entities'] + r['relations']] for r in rows] == expected
    assert set(bad.asked.values()) == {3} and len(bad.asked) == 3*len(CAPTIONS) # two faults each and then the answer
    assert coverage['entities'][NOT_SAID] == len(CAPTIONS) and coverage['entities'][MALFORMED] == 5*len(CAPTIONS)
    assert coverage['relations']['made'] == len(CAPTIONS) and coverage['predicate'][un.SYNONYM] == len(CAPTIONS)
    usage = coverage['usage']
    assert usage['requests'] == 9*len(CAPTIONS) and usage['prompt_tokens'] == 10*usage['completion_tokens'] >= 300*len(CAPTIONS)
    assert abs(usage['cost']*1e6 - usage['prompt_tokens'] - 10*usage['completion_tokens']) < 1e-6


def test_a_killed_run_asks_for_nothing_again(serve, tmp_path):
    parse_file(((i, f'{i}.png', c) for i, c in enumerate(CAPTIONS)), tmp_path/'parse', shard_size=15)
    fail = threading.Event()
    def dying(handler, n, step, user):
        if sum(server.asked.values()) > 50: fail.set()
        return (500, {}, b'down') if fail.is_set() else well(handler, n, step, user)
    server = serve(dying)
    with pytest.raises(CSClipError, match='status 500: down.*is the server up'): extract_file(tmp_path/'parse', tmp_path/'a', client(server, tries=2))
    answered = {json.loads(line)['key'] for p in (tmp_path/'a').glob('*.jsonl') for line in p.read_text().splitlines()}
    assert len(answered) >= 40 and (tmp_path/'a/part-00000.parquet').exists()
    journal = sorted((tmp_path/'a').glob('*.jsonl'))[-1]
    journal.write_bytes(journal.read_bytes() + b'{"key": "torn')
    again = serve(well)
    extract_file(tmp_path/'parse', tmp_path/'a', client(again))
    assert len(again.asked) == 3*len(CAPTIONS) - len(answered) and set(again.asked.values()) == {1}
    extract_file(tmp_path/'parse', tmp_path/'b', client(serve(well)))
    for p in (tmp_path/'b').glob('*.parquet'): assert p.read_bytes() == (tmp_path/'a'/p.name).read_bytes()
    extract_file(tmp_path/'parse', tmp_path/'a', client(again))
    assert len(again.asked) == 3*len(CAPTIONS) - len(answered)


def test_a_hopeless_model_gives_nothing_and_says_so(serve):
    server = serve(lambda handler, n, step, user: (200, {}, completion('I cannot answer that.')))
    found = extract(client(server, tries=3), CAPTIONS[0])
    assert parts(found) == [] and found.skipped == {('entities', NO_ANSWER): 1} and set(server.asked.values()) == {3}
    assert [b['seed'] for *_, b in server.bodies] == [0, 1, 2]


def test_units_stay_where_their_foils_fail(serve):
    server = serve(lambda handler, n, step, user: well(handler, n, step, user) if step == 'units' else (200, {}, completion('no')))
    found = extract(client(server, tries=2), CAPTIONS[0])
    assert parts(found) == [('red dog', ()), ('cat', ()), ('red dog above cat', ())]
    assert found.skipped == {('object', NO_ANSWER): 1, ('predicate', NO_ANSWER): 1}


@pytest.mark.parametrize('status', [400, 401, 404])
def test_refusals_are_errors_at_once(serve, status):
    server = serve(lambda handler, n, step, user: (status, {}, b'no such model'))
    with pytest.raises(CSClipError, match=f'status {status}: no such model'): client(server).ask('units', 'Caption: a dog')
    assert sum(server.asked.values()) == 1


def test_a_dead_server_is_named():
    with pytest.raises(CSClipError, match='127.0.0.1:9.*ConnectError'): ChatServer('http://127.0.0.1:9/v1', 'any', tries=2, wait=.01).ask('units', 'x')
    with pytest.raises(CSClipError, match='is the server up'): ChatServer('localhost', 'any', tries=1).ask('units', 'x')


def test_what_the_server_asks_for_is_waited(serve):
    server = serve(lambda handler, n, step, user: (429, {'retry-after': '0.4'}, b'') if n == 1 else well(handler, n, step, user))
    start = time.monotonic()
    client(server).ask('units', f'Caption: {CAPTIONS[0]}')
    assert time.monotonic() - start >= .4


@pytest.mark.parametrize('answer', [None, {}, {'entities': 'dog'}, {'entities': {'a': 1}, 'relations': 3}, {'entities': [[]], 'relations': [None]}])
def test_answers_of_any_shape_are_read(answer): assert read_units('A dog', answer)[:2] == ([], [])


def test_entities_stand_in_the_caption_as_whole_words():
    found, related, missing = read_units('The cats sit on an old, old mat', {'entities': ['cat', 'THE CATS', 'old mat', 'mat', 'the'], 'relations': [
        {'subject': 'The  cats', 'predicate': 'sit on', 'object': 'mat'}, {'subject': 'cats', 'predicate': 'sit on', 'object': 'cats'}]})
    assert [e.text for e in found] == ['cats', 'old mat', 'mat'] and missing['entities', NOT_SAID] == 1 and missing['entities', MALFORMED] == 1
    assert [r.text for r in related] == ['cats sit on mat'] and missing['relations', un.NO_ARGUMENT] == 1


def test_schemas_bind_every_key():
    def objects(schema):
        if schema.get('type') == 'object':
            yield schema
            for s in schema['properties'].values(): yield from objects(s)
        elif schema.get('type') == 'array': yield from objects(schema['items'])
    for _, schema in STEPS.values():
        for s in objects(schema): assert s['additionalProperties'] is False and s['required'] == list(s['properties'])


def test_the_second_route_feeds_training_alike(serve, tmp_path):
    from test_generation import Fake, gen
    parse_file(((i, f'{i}.png', c) for i, c in enumerate(CAPTIONS[:4])), tmp_path/'parse')
    gen.generate_file(tmp_path/'parse', tmp_path/'generate', gen.HardNegatives(None, Fake(noun=['bus']), gen.FirstRank()))
    extract_file(tmp_path/'parse', tmp_path/'units', client(serve(well)))
    records = load_supervision(tmp_path/'generate', tmp_path/'units')
    assert [u.text for u in records[0].units[0]] == ['red dog', 'cat', 'red dog above cat'] and len(list(un.half_truths(records, 'LM'))) == 16


def test_the_command(serve, tmp_path, capsys, monkeypatch):
    "The same shards as the function's, what was spent, the key from the environment; started again it asks nothing, and says when it replaces."
    monkeypatch.setenv('OPENAI_API_KEY', 'secret')
    parse_file(((i, f'{i}.png', c) for i, c in enumerate(CAPTIONS)), tmp_path/'parse', shard_size=15)
    server, graphs, out = serve(well), str(tmp_path/'parse'), str(tmp_path/'units')
    given = dict(url=server.url, model='any', concurrency=8, timeout=5., extra='{}', price_read=1., price_written=10.)
    assert cs_clip_extract(graphs, out, **given) == 0
    said = capsys.readouterr().out
    path, headers, body = server.bodies[0]
    assert headers['Authorization'] == 'Bearer secret' and 'chat_template_kwargs' not in body and (body['model'], body['temperature']) == ('any', .3)
    assert said.startswith(f'{graphs}: {len(CAPTIONS)} captions') and 'red dog above cat  ->  red dog below cat' in said
    assert said.endswith(f'{out}: written\n120 requests, 12,000 tokens read, 1,200 written; cost 0.02\n')
    extract_file(graphs, tmp_path/'function', ChatServer(server.url, 'any', extra={}))
    for p in (tmp_path/'function').glob('*.parquet'): assert p.read_bytes() == (tmp_path/'units'/p.name).read_bytes()
    asked = sum(server.asked.values())
    assert cs_clip_extract(graphs, out, **given) == 0 and sum(server.asked.values()) == asked and capsys.readouterr().err == ''
    assert cs_clip_extract(graphs, out, **given, seed=1) == 0
    assert f'{out}: 3 of 3 shards of an earlier run were of other captions, settings or models' in capsys.readouterr().err
    assert cs_clip_extract(graphs, graphs, **given) == 1 and 'choose another folder' in capsys.readouterr().err


def test_the_command_names_a_server_that_refuses(serve, tmp_path, capsys):
    parse_file([(0, '', CAPTIONS[0])], tmp_path/'parse')
    server = serve(lambda handler, n, step, user: (401, {}, b'no key'))
    assert cs_clip_extract(str(tmp_path/'parse'), str(tmp_path/'units'), url=server.url) == 1
    error, = capsys.readouterr().err.splitlines()
    assert error.startswith(f'error: {server.url}: no answer from model "Qwen/Qwen3-8B-AWQ" (status 401: no key)')

"Captions with the scene graphs that are right for them; the head of captions.txt says how they are written and what was decided."
import ast, itertools, re
from pathlib import Path
from cs_clip.files import CSClipError
from cs_clip.parsing import Attribute, Object, Relation, SceneGraph, Span

CAPTIONS = Path(__file__).with_name('captions.txt')


def _split(text, separator): return [part.strip() for part in text.split(separator)]


class _Draft:
    "A graph while its lines are read; `at` is the line."
    def __init__(self, text, at):
        self.at, self.caption, self.objects, self.attributes, self.relations = at, text.strip(), [], [], []
        if text[:1] in ('"', "'"):
            try: self.caption = ast.literal_eval(text)
            except (SyntaxError, ValueError): self.fail(text, 'is no Python string')

    def fail(self, word, why): raise CSClipError(f'{self.at}: {word!r} {why}')

    def find(self, word):
        "Where the caption has a word or several; \"dog#2\" is the second \"dog\"."
        text, _, number = word.partition('#')
        # no part of a longer word, also of a hyphenated one; spaces may be several
        pattern = r'(?<![\w-])' + r'\s+'.join(map(re.escape, text.split())) + r'(?![\w-])'
        found = [m.span() for m in re.finditer(pattern, self.caption)] if text.strip() else []
        if not found: self.fail(word, 'is not in the caption')
        if not number and len(found) > 1: self.fail(word, f'is {len(found)} times in the caption; say {text}#1 or another number')
        if number not in ('', *map(str, range(1, len(found) + 1))): self.fail(word, f'has no such number, but {len(found)} places in the caption')
        start, end = found[int(number or 1) - 1]
        return Span(self.caption[start:end], start, end)

    def object(self, word):
        "The object whose head this is."
        head = self.find(word)
        k = next((k for k, o in enumerate(self.objects) if (o.start, o.end) == (head.start, head.end)), None)
        return self.fail(word, 'heads no object') if k is None else k

    def o(self, text):
        for part in _split(text, ';'):
            phrase = self.find(part.removesuffix('*'))
            head = re.search(r'\w+(?:-\w+)*$', phrase.text)
            if not head: self.fail(part, 'does not end with a head')
            start, number = phrase.start + head.start(), 'plural' if part.endswith('*') else 'singular'
            if self.objects and start <= self.objects[-1].start: self.fail(part, 'comes before the object that it follows here')
            self.objects.append(Object(head[0], start, phrase.end, phrase, number))

    def a(self, text):
        for part in _split(text, ';'):
            word, colon, said = part.partition(':')
            if not colon: self.fail(part, 'is no "head: attributes"')
            for s in map(self.find, _split(said, ',')): self.attributes.append(Attribute(s.text, s.start, s.end, self.object(word.strip())))

    def r(self, text):
        for part in _split(text, ';'):
            parts = re.fullmatch(r'(.+?) -(.+?)-> (.+)', part)
            if not parts: self.fail(part, 'is no "subject -words-> object"')
            subjects, goals = ([self.object(w) for w in _split(parts[i], ',')] for i in (1, 3))
            spans = tuple(map(self.find, _split(parts[2], ' .. ')))
            for a, b in itertools.pairwise(spans):
                if not self.caption[a.end:max(a.end, b.start)].strip(): self.fail(parts[2], 'does not stand apart in this order')
            for s, o in itertools.product(subjects, goals):
                if s == o: self.fail(part, 'relates an object to itself')
                self.relations.append(Relation(spans, s, o))

    def graph(self):
        "In the order of the text, as the parser gives it."
        attributes = sorted(self.attributes, key=lambda a: a.start)
        relations = sorted(self.relations, key=lambda r: (r.start, r.end, r.subject, r.object))
        for name, found in (('attribute', attributes), ('relation', relations)):
            for x in found:
                if found.count(x) > 1: self.fail(x.text, f'is the same {name} twice')
        return SceneGraph(self.caption, tuple(self.objects), tuple(attributes), tuple(relations))


def read_gold(path=CAPTIONS) -> dict[str, list[SceneGraph]]:
    "The graphs by construction. Raises `CSClipError` with file, line and word for what does not fit."
    drafts = {}
    for n, line in enumerate(Path(path).read_text(encoding='utf-8').splitlines(), 1):
        at, (kind, _, text) = f'{Path(path).name}:{n}', line.partition(' ')
        if not line.strip() or kind == '#': continue
        if kind == '==' and text not in drafts: last = drafts[text] = []
        elif kind == '>' and drafts: last.append(_Draft(text, at))
        elif kind in ('o', 'a', 'r') and drafts and last:
            last[-1].at = at
            getattr(last[-1], kind)(text)
        else: raise CSClipError(f'{at}: {line!r} is no new heading, no caption below one and no line of a caption')
    return {name: [d.graph() for d in found] for name, found in drafts.items()}


def elements(g):
    "What is counted of a graph, by place: a word that is right somewhere else is wrong."
    heads = [(o.start, o.end) for o in g.objects]
    relations = {(heads[r.subject], tuple((s.start, s.end) for s in r.spans), heads[r.object]) for r in g.relations}
    return dict(objects=set(heads), phrases={(o.phrase.start, o.phrase.end, o.number) for o in g.objects},
                attributes={(a.start, a.end, heads[a.object]) for a in g.attributes}, relations=relations, pairs={(s, o) for s, _, o in relations})


def scores(pairs) -> dict[str, tuple[float, float, float]]:
    "Micro precision, recall and F1 of (right graph, parsed graph) by element."
    pairs = [(elements(right), elements(found)) for right, found in pairs]
    def of(name):
        both, found, right = (sum(map(len, x)) for x in zip(*((a[name] & b[name], b[name], a[name]) for a, b in pairs)))
        return both/max(found, 1), both/max(right, 1), 2*both/max(found + right, 1)
    return {name: of(name) for name in pairs[0][0]}


def difference(right, found) -> tuple[list[str], list[str]]:
    "What a parsed graph lacks and what it has too much of objects, attributes and relations, in words."
    def said(g):
        name, at = lambda k: g.objects[k].text, lambda s: (s.start, s.end)
        return {**{at(o): o.text for o in g.objects},
                **{(at(a), at(g.objects[a.object]), 'attribute'): f'{name(a.object)} *{a.text}*' for a in g.attributes},
                **{(*map(at, r.spans), at(g.objects[r.subject]), at(g.objects[r.object])): f'{name(r.subject)} *{r.text}* {name(r.object)}'
                   for r in g.relations}}
    a, b = said(right), said(found)
    return [a[k] for k in a if k not in b], [b[k] for k in b if k not in a]

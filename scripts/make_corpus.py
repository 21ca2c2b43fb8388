"""Build the training corpus of the bundled tiny model from four Debian packages, and its held-out texts.

Owns where each domain comes from, what one document is, and which documents are never trained on.
Needs a Debian system with apt-get, dpkg-deb and groff; knows nothing of tokens or models.

    python scripts/make_corpus.py --work build/corpus --heldout tests/data/heldout
"""

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("bible-kjv", "bible-kjv-text", "python3.11-doc", "manpages", "manpages-dev", "jargon-text")
DOMAINS = ("kjv", "rst", "man", "jargon")
HELDOUT_MIN_BYTES = 120_000
HELDOUT_MAX_BYTES = 150_000
# A larger document could fill the held-out file alone, and then one odd text would stand for the domain.
HELDOUT_MAX_DOCUMENT_BYTES = 64_000
# Lines shorter than this (headings, "Return value", lone braces) repeat everywhere and say nothing about copies.
COPY_LINE_CHARS = 40
MAX_COPIED_SHARE = 0.5
JARGON_ENTRIES_PER_DOCUMENT = 40


def run(command, **kwargs):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, **kwargs).stdout


def fetch_packages(work):
    """Download and unpack the packages once; return {package: (root, version)}."""
    debs, unpacked = work / "debs", work / "packages"
    debs.mkdir(parents=True, exist_ok=True)
    found = {}
    for package in PACKAGES:
        if not list(debs.glob(f"{package}_*.deb")):
            run(["apt-get", "download", package], cwd=debs)
        deb = sorted(debs.glob(f"{package}_*.deb"))[-1]
        root = unpacked / package
        if not root.exists():
            root.mkdir(parents=True)
            run(["dpkg-deb", "-x", str(deb), str(root)])
        found[package] = (root, run(["dpkg-deb", "-f", str(deb), "Version"], text=True).strip())
    return found


def read_kjv(packages):
    """One document per book, as the `bible` program prints it."""
    program = packages["bible-kjv"][0] / "usr/bin/bible"
    library = packages["bible-kjv-text"][0] / "usr/lib"
    text = run([str(program), "-l79", "-p", str(library), "gen1:1-rev22:21"], text=True)
    documents = {}
    for chapter in re.split(r"^(?=[1-3A-Z][A-Za-z ]+ \d+\n)", text, flags=re.M):
        if chapter.strip():
            book = chapter.split("\n", 1)[0].rsplit(" ", 1)[0]
            documents[book] = documents.get(book, "") + chapter.strip("\n") + "\n\n"
    return documents


def read_rst(packages):
    """One document per reST source file of the Python documentation."""
    sources = packages["python3.11-doc"][0] / "usr/share/doc/python3.11/html/_sources"
    return {
        str(path.relative_to(sources)).removesuffix(".rst.txt"): path.read_text(encoding="utf-8")
        for path in sorted(sources.rglob("*.rst.txt"))
    }


def man_sources(packages):
    for package in ("manpages", "manpages-dev"):
        for path in sorted((packages[package][0] / "usr/share/man").glob("man*/*.gz")):
            if not path.is_symlink():
                source = gzip.decompress(path.read_bytes())
                if not source.startswith(b".so "):
                    yield path.stem, source


def read_man(packages):
    """One document per page, rendered to ragged plain text without hyphenation."""
    command = ["groff", "-Kutf8", "-t", "-man", "-Tascii", "-rLL=78n", "-rLT=78n", "-rHY=0", "-dAD=l", "-P-cbou"]
    documents = {}
    for name, source in man_sources(packages):
        # an-old.tmac justifies on every .TH; the ragged request must follow it to last.
        ragged = re.sub(rb"^(\.TH .*)$", rb"\1\n.na", source, count=1, flags=re.M)
        text = run(command, input=ragged, stderr=subprocess.DEVNULL).decode("ascii", "replace")
        documents[name] = re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n\n"
    return documents


def read_jargon(packages):
    """One document per lexicon entry; front matter and appendices are one document each, never held out."""
    path = packages["jargon-text"][0] / "usr/share/doc/jargon-text/jargon.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode("utf-8")
    parts = re.split(r"^(?=   :[^\n]*:)", text, flags=re.M)
    # The table of contents lists every headword, held-out ones included: start at the introduction proper.
    introduction = parts[0].rfind("Introduction")
    documents = {"(front)": parts[0][max(introduction, 0) :].lstrip()}
    for number, part in enumerate(parts[1:]):
        documents[f"{number:04d} {part.split(':', 2)[1]}"] = part
    return documents


READERS = {"kjv": read_kjv, "rst": read_rst, "man": read_man, "jargon": read_jargon}


def heldout_candidates(domain, documents, packages):
    names = [name for name, text in documents.items() if len(text.encode()) <= HELDOUT_MAX_DOCUMENT_BYTES]
    if domain == "man":
        # The held-out text is redistributed: take pages under the manual pages' own verbatim-copy licence only.
        free = {
            name
            for name, source in man_sources(packages)
            if re.search(rb"SPDX-License-Identifier:\s*Linux-man-pages-copyleft\s*$", source, re.M)
        }
        names = [name for name in names if name in free]
    if domain == "jargon":
        names = names[1:-1]
    return names


def choose_heldout(names, documents):
    """Documents in the order of a hash of their name, until the file is large enough."""
    chosen, total = set(), 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        length = len(documents[name].encode())
        if total + length <= HELDOUT_MAX_BYTES and total < HELDOUT_MIN_BYTES:
            chosen.add(name)
            total += length
    return chosen


def long_lines(text):
    return [line.strip() for line in text.splitlines() if len(line.strip()) >= COPY_LINE_CHARS]


def drop_copies(documents, heldout):
    """Training documents without exact repeats and without near copies of held-out ones."""
    heldout_lines = {line for name in heldout for line in long_lines(documents[name])}
    seen, kept, dropped = set(), {}, []
    for name, text in documents.items():
        if name in heldout:
            continue
        lines = long_lines(text)
        copied = sum(line in heldout_lines for line in lines)
        if text in seen or copied > MAX_COPIED_SHARE * max(len(lines), 1):
            dropped.append(name)
            continue
        seen.add(text)
        kept[name] = text
    return kept, dropped


def group_jargon(documents):
    """Neighbouring entries together, so that a training window is not mostly document boundaries."""
    items = list(documents.items())
    groups = {}
    for start in range(0, len(items), JARGON_ENTRIES_PER_DOCUMENT):
        group = items[start : start + JARGON_ENTRIES_PER_DOCUMENT]
        groups[f"{group[0][0]} .."] = "".join(text for _, text in group)
    return groups


def man_notices(packages, heldout):
    """The copyright lines of the held-out pages, which their licence wants kept with formatted copies."""
    for name, source in man_sources(packages):
        if name in heldout:
            lines = re.findall(r'^[.\']\\"\s*(.*copyright.*)$', source.decode("utf-8", "replace"), re.M | re.I)
            yield name, [line.strip() for line in lines] or ["(no copyright line in the source)"]


def write_domain(domain, packages, work, heldout_dir):
    documents = READERS[domain](packages)
    heldout = choose_heldout(heldout_candidates(domain, documents, packages), documents)
    train, dropped = drop_copies(documents, heldout)
    if domain == "jargon":
        train = group_jargon(train)
    text = "".join(text for name, text in documents.items() if name in heldout)
    (heldout_dir / f"{domain}.txt").write_text(text, encoding="utf-8", newline="\n")
    with (work / f"{domain}.jsonl").open("w", encoding="utf-8") as file:
        for name, body in train.items():
            file.write(json.dumps({"name": name, "text": body}) + "\n")
    if domain == "man":
        with (heldout_dir / "man.copyright.txt").open("w", encoding="utf-8") as file:
            file.write("Copyright notices of the pages in man.txt (Linux man-pages, Linux-man-pages-copyleft)\n")
            for name, lines in man_notices(packages, heldout):
                file.write(f"\n{name}\n" + "".join(f"  {line}\n" for line in lines))
    report = {
        "train_documents": len(train),
        "train_bytes": sum(len(t.encode()) for t in train.values()),
        "heldout_bytes": len(text.encode()),
        "heldout": [name for name in documents if name in heldout],
        "dropped": dropped,
    }
    print(
        f"{domain}: {report['train_documents']} documents, {report['train_bytes']:,} bytes; held out "
        f"{len(heldout)} documents, {report['heldout_bytes']:,} bytes; {len(dropped)} copies dropped",
        file=sys.stderr,
    )
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for packages and the training text")
    parser.add_argument("--heldout", type=Path, required=True, help="directory for the held-out texts")
    args = parser.parse_args()
    args.heldout.mkdir(parents=True, exist_ok=True)
    packages = fetch_packages(args.work)
    report = {
        "packages": {name: version for name, (_, version) in packages.items()},
        "domains": {domain: write_domain(domain, packages, args.work, args.heldout) for domain in DOMAINS},
    }
    (args.work / "corpus.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

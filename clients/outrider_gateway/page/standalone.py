"""Makes one HTML file of the page and a recording, which plays without a server and from a file.

    python -m outrider_gateway.page.standalone race.json > demo.html

Browsers load no modules from files, so each becomes a data: URL that an import map names.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

from outrider_gateway.page.routes import STATIC, legend

IMPORT = re.compile(r'from "\./([a-z]+\.js)"')


def standalone(recording: str) -> str:
    """Returns the page with a recording in it. Raises ValueError if the recording is not JSON."""
    found = json.loads(recording)
    # In a script element, only its own end tag and comments are read as HTML.
    quoted = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")
    imports = {f"page/{path.name}": _module(path) for path in sorted(STATIC.glob("*.js"))}
    head = (
        f"<style>{(STATIC / 'page.css').read_text(encoding='utf-8')}</style>\n"
        f'<script type="importmap">{json.dumps({"imports": imports})}</script>\n'
        f'<script type="application/json" id="recording">{quoted}</script>\n'
        f'<script type="application/json" id="methods">{legend().decode()}</script>\n'
        '<script type="module">import "page/main.js";</script>'
    )
    icon = base64.b64encode((STATIC / "favicon.svg").read_bytes()).decode()
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    page = page.replace("/page/favicon.svg", f"data:image/svg+xml;base64,{icon}")
    page = page.replace('  <link rel="stylesheet" href="/page/page.css">\n', "")
    return page.replace('  <script type="module" src="/page/main.js"></script>', head)


def _module(path: Path) -> str:
    code = IMPORT.sub(r'from "page/\1"', path.read_text(encoding="utf-8"))
    return f"data:text/javascript;base64,{base64.b64encode(code.encode()).decode()}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m outrider_gateway.page.standalone RECORDING.json > demo.html")
    print(standalone(Path(sys.argv[1]).read_text(encoding="utf-8")))

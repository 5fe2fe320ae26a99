// Prompts that suit a small model trained on Python's standard library, and larger ones too.

/** @type {{name: string, prompt: string}[]} */
export const EXAMPLES = [
  { name: "A test case", prompt: "class TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = Queue()\n\n    def test_put(self):\n" },
  { name: "A class", prompt: 'class Server:\n    """A server that accepts connections.\n\n    ' },
  { name: "A function", prompt: 'def add(a, b):\n    """Return the sum of a and b."""\n' },
  { name: "A docstring", prompt: 'class date:\n    """Concrete date type.\n\n    Constructors:\n\n' },
  { name: "A command", prompt: "import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n" },
];

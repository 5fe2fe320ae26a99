// What to begin with: turns for a model that chats, and beginnings of files for one that was trained on code alone.

/**
 * @typedef {object} Example
 * @property {string} name
 * @property {string} prompt
 * @property {boolean} [isJson] - Whether the answer is to be a JSON object.
 */

/** @type {Example[]} */
export const TURNS = [
  { name: "Write", prompt: "Write a short story about a lighthouse keeper who finds a letter in a bottle." },
  { name: "Explain", prompt: "Explain to a child why the sky is blue." },
  { name: "JSON", prompt: "Describe a cat as a JSON object with its name, age, colour and three things that it likes.", isJson: true },
];

/** @type {Example[]} */
export const TEXTS = [
  { name: "A test case", prompt: "class TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = Queue()\n\n    def test_put(self):\n" },
  { name: "A class", prompt: 'class Server:\n    """A server that accepts connections.\n\n    ' },
  { name: "A function", prompt: 'def add(a, b):\n    """Return the sum of a and b."""\n' },
  { name: "A docstring", prompt: 'class date:\n    """Concrete date type.\n\n    Constructors:\n\n' },
  { name: "A command", prompt: "import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n" },
];

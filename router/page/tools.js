// Two tools that a model may call, to try tools out. They run here, in the page.

export const tools = {
  clock: {
    description: "The date and time now, where the user is",
    parameters: { type: "object", properties: {}, additionalProperties: false },
    run: () => new Date().toString(),
  },
  calculator: {
    description: "The value of an arithmetic expression with + - * / % ^, parentheses, sqrt, sin, cos, log, exp and pi",
    parameters: {
      type: "object", properties: { expression: { type: "string" } }, required: ["expression"], additionalProperties: false,
    },
    run: ({ expression }) => String(calculate(String(expression))),
  },
};

/** What a call comes to, as text; what is wrong with it, too, since the model is to read it. */
export function run(name, text) {
  try {
    if (!Object.hasOwn(tools, name)) throw new Error("there is no such tool");
    return tools[name].run(JSON.parse(text || "{}"));
  } catch (error) {
    return `error: ${error.message}`;
  }
}

/** Throws an Error that says what is not understood. */
export function calculate(text) {
  if (text.length > 1000) throw new Error("the expression is too long");
  const words = text.match(/\d+\.?\d*(?:e[+-]?\d+)?|\.\d+|[a-z]+|\S/gi) ?? [];
  const functions = { sqrt: Math.sqrt, sin: Math.sin, cos: Math.cos, log: Math.log, exp: Math.exp };
  let at = 0;
  const takes = (...wanted) => (wanted.includes(words[at]) ? words[at++] : undefined);
  const sum = () => {
    let value = product();
    for (let sign; (sign = takes("+", "-")); ) value = sign === "+" ? value + product() : value - product();
    return value;
  };
  const product = () => {
    let value = signed();
    for (let sign; (sign = takes("*", "/", "%")); ) {
      const by = signed();
      value = sign === "*" ? value * by : sign === "/" ? value / by : value % by;
    }
    return value;
  };
  const signed = () => (takes("-") ? -signed() : takes("+") ? signed() : power());
  const power = () => {
    const base = one();
    return takes("^") ? base ** signed() : base;
  };
  const one = () => {
    const word = words[at++];
    if (word === "(") {
      const value = sum();
      if (!takes(")")) throw new Error("a parenthesis is open");
      return value;
    }
    if (word === "pi") return Math.PI;
    if (Object.hasOwn(functions, word ?? "")) {
      if (words[at] !== "(") throw new Error(`${word} wants parentheses`);
      return functions[word](one());
    }
    if (word === undefined || Number.isNaN(Number(word))) throw new Error(`${word ?? "the end"} is not understood`);
    return Number(word);
  };
  const value = sum();
  if (at < words.length) throw new Error(`${words[at]} is not understood`);
  return value;
}

// A stand-in for a browser: runs the script of a page, and prints its plots, and the text that it put into elements.
const [data, script] = JSON.parse(require("fs").readFileSync(0, "utf8"));

class Element {
  constructor() {
    Object.assign(this, { children: [], dataset: {}, style: {}, textContent: "", value: "", tBodies: [{ rows: [] }] });
    this.classList = { toggle() {} };
  }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  addEventListener() {}
  setAttribute() {}
  scrollIntoView() {}
  on() {}
}

const byId = { "page-data": Object.assign(new Element(), { textContent: data }) };
const plots = {};
globalThis.document = {
  getElementById: (id) => (byId[id] ??= new Element()),
  createElement: () => new Element(),
  createElementNS: () => new Element(),
  querySelector: () => new Element(),
  querySelectorAll: () => [],
};
globalThis.Plotly = {
  newPlot: (place, traces, layout, config) => {
    plots[Object.keys(byId).find((id) => byId[id] === place)] = { traces, config };
  },
};
(0, eval)(script);
const text = (child) => (child instanceof Element ? [child.textContent, ...child.children.map(text)].join(" ") : child);
const texts = Object.fromEntries(Object.entries(byId).map(([id, place]) => [id, place.children.map(text).join(" ")]));
console.log(JSON.stringify({ plots, texts }));

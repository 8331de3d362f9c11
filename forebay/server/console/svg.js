// Pictures of numbers: nodes of SVG, sized in percent or in points of their own box.

const SVG = "http://www.w3.org/2000/svg";

export function draw(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export const share = (part, whole) => `${(whole ? (100 * part) / whole : 0).toFixed(3)}%`;

// A picture with a name. `words` are what it shows.
export function picture(className, words, attributes, ...children) {
  return draw("svg", { class: className, role: "img", "aria-label": words, ...attributes }, ...children);
}

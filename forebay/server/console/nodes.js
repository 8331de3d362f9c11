// Elements, and the clipboard.

export function make(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function button(label, act) {
  const made = make("button", "quiet", label);
  made.type = "button";
  made.addEventListener("click", () => act(made));
  return made;
}

export async function copyFrom(copier, text) {
  copier.textContent = (await copyText(text)) ? "Copied" : "Not allowed";
  setTimeout(() => (copier.textContent = "Copy"), 1500);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // the clipboard API exists only on https and localhost
  }
}

function copyBySelection(text) {
  const field = make("textarea", "hidden");
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

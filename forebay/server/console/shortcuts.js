// The keyboard, and the sheet that says what it does.

const $ = (id) => document.getElementById(id);

const isWriting = (target) => target.closest?.("input, textarea, select") !== null;

export function listen(act) {
  $("open-help").addEventListener("click", () => $("help").showModal());
  $("help").addEventListener("click", (event) => event.target === $("help") && $("help").close());
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
    const does = actionOf(event, act);
    if (!does) return;
    if (event.key !== "Escape") event.preventDefault(); // it closes what is open, too
    does();
  });
}

function actionOf(event, act) {
  const { key, target } = event;
  const command = event.ctrlKey || event.metaKey;
  const name = key.toLowerCase();
  if (command && event.shiftKey) return { o: act.begin, e: act.edit }[name];
  if (command && !event.altKey) return { k: act.search, b: act.togglePanel, ",": act.settings, "/": help }[name];
  if (event.altKey) return null;
  if (key === "Escape") return document.querySelector("[popover]:popover-open") ? null : act.stop;
  if (target === $("prompt") && key === "ArrowUp" && !target.value) return act.edit;
  if (isWriting(target)) return null;
  return { "?": help, "/": () => $("prompt").focus(), r: act.regenerate }[key];
}

const help = () => $("help").showModal();

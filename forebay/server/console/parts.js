// What an answer has besides its text: thinking, folded, and calls of tools with fields for their results.

import { button, make } from "./nodes.js";

export class Thinking {
  constructor() {
    this.text = "";
    this.summary = make("summary", "", "Thinking");
    this.body = make("div", "");
    this.view = make("details", "thought", this.summary, this.body);
    this.view.hidden = true;
  }

  add(text) {
    this.text += text;
  }

  draw() {
    this.view.hidden = !this.text;
    this.body.textContent = this.text;
  }

  end() {
    this.draw();
    this.summary.textContent = "Thought";
  }
}

export class Calls {
  constructor() {
    this.list = [];
    this.view = make("ol", "calls");
  }

  // Adds what a chunk of the stream says of calls.
  add(deltas) {
    for (const { index, id, function: said } of deltas) {
      if (!this.list[index]) {
        const code = make("code", "");
        const item = make("li", "", make("h3", "", said.name), make("pre", "", code));
        item.setAttribute("aria-label", `Call of ${said.name}`);
        this.list[index] = { id, name: said.name, text: "", code, item };
        this.view.append(item);
      }
      this.list[index].text += said.arguments ?? "";
    }
  }

  draw() {
    for (const call of this.list) call.code.textContent = call.text;
  }

  // Asks for a result of each call; `onResults` is told when the user sends them.
  ask(onResults) {
    for (const call of this.list) {
      call.result = make("textarea", "");
      call.result.rows = 2;
      call.result.placeholder = "Result";
      call.result.setAttribute("aria-label", `Result of ${call.name}`);
      call.item.append(call.result);
    }
    this.sender = button("Send results", () => {
      this.close();
      onResults();
    });
    this.view.after(this.sender);
  }

  close() {
    this.sender?.remove();
    for (const call of this.list) if (call.result) call.result.readOnly = true;
  }

  // As the API wants them back.
  get asked() {
    return this.list.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }

  get results() {
    return this.list.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value }));
  }
}

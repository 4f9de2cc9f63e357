/* Lets the reader answer a prediction before its cell unfolds, and keeps the answers in the browser. Without this
   script the cells are folded, and nothing else. */

{
  const words = JSON.parse(document.currentScript.dataset.words); // in the page's language, by the English ones
  const t = (text, ...values) => (words[text] ?? text).replace(/\{(\d)\}/g, (_, k) => values[k]);
  const KEY = "stable-diffusion-in-jax: predictions";
  const chapterOf = (path) => path.match(/\/notebooks\/([^/]+)\.html$/)?.[1];
  const here = chapterOf(location.pathname);
  const forms = [...document.querySelectorAll("form.quiz")];

  /* {chapter: {of: how many predictions it has, cells: {cell: {given: [texts], right: true, false or null}}}} */
  function read() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {};
    }
  }

  /* Whether it is kept: a browser may forbid that. */
  function write(kept) {
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
      return true;
    } catch {
      return false;
    }
  }

  /* The numbers in a text, whose thousands may be parted: one for "2.1 GB", several for a shape. */
  function numbersIn(text, isShape) {
    const plain = text.normalize("NFKC").replaceAll("−", "-");
    const parted = isShape ? plain : plain.replace(/(\d)[, _](?=\d{3}(\D|$))/g, "$1");
    return (parted.match(/-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?/gi) ?? []).map(Number);
  }

  /* What is wrong with the form of an answer, in a sentence. */
  function complaint(given, answer) {
    const found = numbersIn(given, answer.startsWith("("));
    if (answer.startsWith("(")) return found.length ? "" : t("“{0}” is no shape: write it as (4, 77).", given);
    return found.length === 1 ? "" : t("“{0}” is not one number: write it as 2.1 or 49,152.", given);
  }

  function isRight(given, answer) {
    const isShape = answer.startsWith("(");
    const [found, expected] = [given, answer].map((text) => numbersIn(text, isShape));
    if (isShape) return found.join() === expected.join();
    return Math.abs(found[0] - expected[0]) <= 0.05 * Math.abs(expected[0]) + 1e-9;
  }

  const parts = (form) => [...form.querySelectorAll("[data-ask]")];
  const fieldOf = (form, k) => form.elements[`q${k}`]; // its value is a text, or the number of what was chosen

  /* Say what was right, unfold the cell, and give what is to be kept. */
  function judge(form) {
    const given = parts(form).map((_, k) => fieldOf(form, k).value);
    let right = null;
    const sentences = parts(form).map((part, k) => {
      const { ask, answer } = part.dataset;
      if (answer === undefined) return t("Compare it with the output below.");
      const isChoice = part.matches("fieldset");
      const hit = isChoice ? given[k] === answer : isRight(given[k], answer);
      right = hit && right !== false;
      const text = isChoice ? part.querySelectorAll("label")[answer].textContent.trim() : answer;
      const sentence = hit ? t("Right: {0}", text) : t("Not quite. The answer is: {0}", text);
      return given.length > 1 ? `${ask} – ${sentence}` : sentence;
    });
    say(form, sentences);
    form.nextElementSibling.querySelector("details").open = true;
    return { given, right };
  }

  function say(form, sentences) {
    const lines = sentences.map((sentence) => {
      const line = document.createElement("span");
      line.textContent = sentence;
      return line;
    });
    form.querySelector("[role=status]").replaceChildren(...lines);
  }

  function answered(event) {
    event.preventDefault();
    const form = event.target;
    const texts = parts(form).filter((part) => part.dataset.answer !== undefined && !part.matches("fieldset"));
    const wrong = texts.map((part) => complaint(part.querySelector("input").value, part.dataset.answer));
    if (wrong.some(Boolean)) return say(form, wrong.filter(Boolean));
    const answer = judge(form);
    const kept = read();
    const cells = { ...kept[here]?.cells, [form.dataset.cell]: answer };
    if (!write({ ...kept, [here]: { of: forms.length, cells } })) {
      form.querySelector("[role=status]").append(t("This browser keeps nothing: your answer is gone when you leave the page."));
    }
    mark();
  }

  /* Show what was answered before, where the same is still asked. */
  function restore() {
    const cells = read()[here]?.cells ?? {};
    for (const form of forms) {
      const given = cells[form.dataset.cell]?.given ?? [];
      if (given.length !== parts(form).length) continue;
      given.forEach((text, k) => (fieldOf(form, k).value = text));
      if (form.checkValidity()) judge(form);
    }
  }

  /* A mark at each link to a chapter of which something is answered, and the table on the page of progress. */
  function mark() {
    const kept = read();
    const count = (chapter) => Object.keys(kept[chapter]?.cells ?? {}).length;
    for (const link of document.querySelectorAll("nav.bd-links a, .bd-article td:first-child a:not(.timing a)")) {
      const chapter = chapterOf(link.pathname);
      link.querySelector(".answered")?.remove();
      if (!chapter || link.hash || !count(chapter)) continue;
      const sign = document.createElement("span");
      sign.className = "answered";
      sign.setAttribute("role", "img");
      sign.setAttribute("aria-label", t("{0} of {1} predictions answered", count(chapter), kept[chapter].of));
      sign.textContent = count(chapter) >= kept[chapter].of ? "✓" : `${count(chapter)}/${kept[chapter].of}`;
      link.append(sign);
    }
    for (const row of document.querySelectorAll("#progress [data-chapter]")) {
      const cells = Object.values(kept[row.dataset.chapter]?.cells ?? {});
      row.cells[2].textContent = cells.length;
      row.cells[3].textContent = cells.filter((cell) => cell.right).length;
    }
  }

  for (const form of forms) {
    form.hidden = false;
    form.addEventListener("submit", answered);
  }
  restore();
  const forget = document.getElementById("forget");
  if (forget) {
    forget.hidden = false;
    forget.querySelector("button").addEventListener("click", () => {
      write({});
      mark();
      forget.querySelector("[role=status]").textContent = t("All answers are forgotten.");
    });
  }
  mark();
}

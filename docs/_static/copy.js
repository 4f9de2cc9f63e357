/* Puts a button on each block of code that copies it. Outputs have none. */

const chinese = document.documentElement.lang.startsWith("zh");
const words = chinese
  ? { copy: "复制", copied: "已复制", failed: "无法复制" }
  : { copy: "Copy", copied: "Copied", failed: "Not copied" };

/* What a block says; of an example with Python's prompts, what a person types. */
function codeOf(block) {
  const lines = block.querySelector("pre").textContent.replace(/\n+$/, "").split("\n");
  const typed = lines.filter((line) => /^(>>>|\.\.\.)( |$)/.test(line));
  return lines[0].startsWith(">>> ") ? typed.map((line) => line.slice(4)).join("\n") : lines.join("\n");
}

function addButton(block) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy-code";
  button.textContent = words.copy;
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(codeOf(block));
      button.textContent = words.copied;
    } catch {
      button.textContent = words.failed;
    }
    setTimeout(() => (button.textContent = words.copy), 2000);
  });
  block.append(button);
}

/* Browsers lend the clipboard only to pages that came safely. */
if (navigator.clipboard) {
  for (const block of document.querySelectorAll("div.highlight")) {
    if (!block.closest(".cell_output")) addButton(block);
  }
}

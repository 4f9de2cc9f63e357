// Recorded images, one at a time, chosen by two sliders. Without scripts the page shows all of them side by side.
for (const part of document.querySelectorAll(".recorded:not(.ready)")) {
  const words = JSON.parse(document.getElementById("draw-texts").textContent); // as in draw.js
  const t = (text, ...values) => (words[text] ?? text).replace(/\{(\d)\}/g, (_, k) => values[k]);
  const [steps, guidance] = part.querySelectorAll("input");
  const numbers = (slider) => slider.dataset.numbers.split(", ");
  const pictures = [...part.querySelectorAll("img")].map((sheet) => {
    const picture = document.createElement("div");
    picture.className = "recorded-picture";
    picture.setAttribute("role", "img");
    picture.style.backgroundImage = `url("${sheet.src}")`;
    picture.style.backgroundSize = `${100 * numbers(steps).length}% ${100 * numbers(guidance).length}%`;
    const caption = document.createElement("figcaption");
    caption.textContent = sheet.dataset.caption;
    sheet.before(picture, caption); // the sheet is what print shows
    return picture;
  });
  const show = () => {
    for (const slider of [steps, guidance]) {
      slider.max = numbers(slider).length - 1;
      slider.previousElementSibling.textContent = numbers(slider)[slider.value];
      slider.setAttribute("aria-valuetext", numbers(slider)[slider.value]);
    }
    const place = [steps, guidance].map((slider) => `${(100 * slider.value) / slider.max}%`).join(" ");
    for (const picture of pictures) {
      picture.style.backgroundPosition = place;
      const [column, row] = [steps, guidance].map((slider) => numbers(slider)[slider.value]);
      const caption = picture.nextElementSibling.textContent;
      picture.setAttribute("aria-label", t("{0}, after {1} steps at guidance scale {2}", caption, column, row));
    }
  };
  steps.addEventListener("input", show);
  guidance.addEventListener("input", show);
  part.querySelector("p").textContent = t("Recorded images: move the sliders.");
  part.querySelector(".recorded-controls").hidden = false;
  part.classList.add("ready");
  show();
}

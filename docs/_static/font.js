/* Where a system has no font for Chinese, all its signs are the same box: Chinese pages then say so in English. */
function draw(sign) {
  const context = Object.assign(document.createElement("canvas"), { width: 40, height: 40 }).getContext("2d");
  context.font = `30px ${getComputedStyle(document.body).fontFamily}`;
  context.fillText(sign, 5, 32);
  return context.getImageData(0, 0, 40, 40).data.join();
}

if (draw("设") === draw("备")) {
  const said = Object.assign(document.createElement("p"), { className: "no-font", lang: "en" });
  said.textContent =
    "Your system has no font for Chinese, so this page shows boxes. Install one and open your browser again: " +
    "on Debian and Ubuntu, sudo apt-get install fonts-noto-cjk.";
  document.querySelector("article").prepend(said);
}

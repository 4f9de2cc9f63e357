// A widget's texts in the page's own language, by the English ones; {0} and so on is what is put in.
export function textsOf(form) {
  const words = JSON.parse(form.querySelector("script").textContent);
  return (text, ...values) => (words[text] ?? text).replace(/\{(\d)\}/g, (_, k) => values[k]);
}

// Pictures that go with a message: read here, made small enough to send, and shown.

import { make } from "./nodes.js";

const LONGEST_EDGE = 2048; // pixels
const SMALL = 1 << 20; // bytes; up to so many a file is sent as it is, and a picture as PNG
const QUALITY = 0.9; // of JPEG
const STILL = /^image\/(?:png|jpeg)$/; // of others, which may be animated, the first frame is sent
const TYPES = /^image\/(?:png|jpeg|webp|gif)$/;
const HEAD = /^data:image\/(?:png|jpeg|webp|gif);base64,/;

export const isPicture = ({ type }) => type.startsWith("image/") && type !== "image/svg+xml"; // SVG is text

// The picture in a file, as `{ name, url, width, height }`, or what is wrong with it.
export async function pictureOf(file) {
  const { name, type } = file;
  if (!TYPES.test(type)) return `${name} is of the type ${type}: pictures are PNG, JPEG, WebP or GIF.`;
  let bitmap;
  try {
    bitmap = await createImageBitmap(file); // upright, as the camera was held
    const scale = Math.min(1, LONGEST_EDGE / Math.max(bitmap.width, bitmap.height));
    const [width, height] = [bitmap.width, bitmap.height].map((edge) => Math.max(1, Math.round(edge * scale)));
    const sent = scale === 1 && file.size <= SMALL && STILL.test(type) ? file : await drawn(bitmap, width, height, type);
    return { name, url: await dataUrl(sent), width, height };
  } catch {
    return `${name} cannot be read as a picture.`;
  } finally {
    bitmap?.close();
  }
}

// As PNG, which loses nothing, where that is small; photos are not.
async function drawn(bitmap, width, height, type) {
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  if (type !== "image/jpeg") {
    context.drawImage(bitmap, 0, 0, width, height);
    const png = await canvas.convertToBlob({ type: "image/png" });
    if (png.size <= SMALL) return png;
  }
  context.fillStyle = "#fff"; // JPEG has no transparency
  context.fillRect(0, 0, width, height);
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.convertToBlob({ type: "image/jpeg", quality: QUALITY });
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// What storage without room for it keeps of a picture: that there was one.
export const withoutUrl = (picture) => ({ ...picture, url: "" });

export function pictureView({ name, url, width, height }) {
  if (!url) return make("p", "caption", `${name} was not kept: the browser’s storage was full.`);
  const view = make("img", "image");
  return Object.assign(view, { alt: name, width, height, src: url });
}

// Those of a file's pictures that are some.
export function soundPictures(given) {
  if (!Array.isArray(given)) return undefined;
  return given.filter(isSound).map(({ name, url, width, height }) => ({ name, url, width, height }));
}

const isSide = (value) => Number.isSafeInteger(value) && value > 0 && value <= LONGEST_EDGE;
const isUrl = (url) => url === "" || (HEAD.test(url) && !/[^A-Za-z0-9+/=]/.test(url.replace(HEAD, "")));

function isSound(given) {
  const { name, url, width, height } = given ?? {};
  return typeof name === "string" && typeof url === "string" && isUrl(url) && isSide(width) && isSide(height);
}

/* SHA-256 (FIPS 180-4). */

#include <string.h>

#include "parts.h"

/* The first 32 bits of the fractional parts of the cube roots of the first 64 primes. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static uint32_t big_endian(const unsigned char *bytes) {
  return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void add_block(uint32_t state[8], const unsigned char *block) {
  uint32_t w[64], s[8];
  for (int t = 0; t < 16; ++t) w[t] = big_endian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    uint32_t a = w[t - 15], b = w[t - 2];
    w[t] = w[t - 16] + w[t - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) +
           (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
  }
  memcpy(s, state, sizeof s);
  for (int t = 0; t < 64; ++t) {
    uint32_t e = s[4], a = s[0];
    uint32_t first = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +
                     ((e & s[5]) ^ (~e & s[6])) + constants[t] + w[t];
    uint32_t second = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +
                      ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += first;
    s[0] = first + second;
  }
  for (int k = 0; k < 8; ++k) state[k] += s[k];
}

void fusec_sha256_begin(fusec_sha256 *digest) {
  static const uint32_t start[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memset(digest, 0, sizeof *digest);
  memcpy(digest->state, start, sizeof start);
}

void fusec_sha256_add(fusec_sha256 *digest, const void *data, size_t count) {
  const unsigned char *bytes = data;
  while (count) {
    size_t held = digest->bytes % 64, part = 64 - held < count ? 64 - held : count;
    memcpy(digest->block + held, bytes, part);
    if (held + part == 64) add_block(digest->state, digest->block);
    digest->bytes += part;
    bytes += part;
    count -= part;
  }
}

void fusec_sha256_end(fusec_sha256 *digest, unsigned char result[32]) {
  static const unsigned char padding[64] = {0x80};
  uint64_t bits = digest->bytes * 8;
  unsigned char length[8];
  for (int k = 0; k < 8; ++k) length[k] = (unsigned char)(bits >> (56 - 8 * k));
  fusec_sha256_add(digest, padding, 1 + (119 - digest->bytes % 64) % 64);
  fusec_sha256_add(digest, length, sizeof length);
  for (int k = 0; k < 32; ++k) result[k] = (unsigned char)(digest->state[k / 4] >> (24 - 8 * (k % 4)));
}

void fusec_sha256_of(fusec_text text, unsigned char result[32]) {
  fusec_sha256 digest;
  fusec_sha256_begin(&digest);
  fusec_sha256_add(&digest, text.at, text.left);
  fusec_sha256_end(&digest, result);
}

static int hexadecimal(char digit) {
  static const char digits[] = "0123456789abcdef0123456789ABCDEF";
  const char *found = digit ? strchr(digits, digit) : NULL;
  return found ? (int)(found - digits) % 16 : -1;
}

int fusec_digest(fusec_text *text, unsigned char result[32]) {
  fusec_text digits;
  if (!fusec_take(text, 64, &digits)) return 0;
  for (int k = 0; k < 32; ++k) {
    int high = hexadecimal(digits.at[2 * k]), low = hexadecimal(digits.at[2 * k + 1]);
    if (high < 0 || low < 0) return 0;
    result[k] = (unsigned char)(high * 16 + low);
  }
  return 1;
}
